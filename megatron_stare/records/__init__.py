"""Defines the records that travel between tasks, rollouts, rewards and training. Records store
per-token values in flat columns, never in Python lists."""
