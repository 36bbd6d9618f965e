"""Tasks that the policy is trained and evaluated on: prompts, template, environment and verifier
under one name."""
