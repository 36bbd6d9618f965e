"""Rollout sources: from prompts to batches, in step with training or ahead of it, with whole or
partial rollouts."""
