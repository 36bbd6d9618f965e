"""Repeats steps of a run, each time with one change, and names the cause that explains the recorded
metrics (`megatron-stare bisect`)."""
