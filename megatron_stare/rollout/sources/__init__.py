"""Makes batches of trajectories from prompts. Sampling alternates with training or runs ahead of
training. Rollouts are complete or partial."""
