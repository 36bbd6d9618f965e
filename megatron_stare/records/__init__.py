"""Defines the records that tasks, rollouts, rewards and training exchange. A record stores
per-token values in flat tensors, never in Python lists."""
