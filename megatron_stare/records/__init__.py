"""Records that travel between tasks, rollouts, rewards and training: flat columns, never a Python
list per token."""
