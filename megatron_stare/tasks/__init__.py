"""Defines the tasks on which the policy is trained and evaluated. A task combines prompts, a
template, an environment and a verifier under one name."""
