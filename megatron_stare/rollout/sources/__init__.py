"""Makes batches of trajectories from prompts. Sampling is in step with training or ahead of
training, with complete or partial rollouts."""
