"""Repeats steps of a run, unchanged and with one change at a time, and names the cause that
explains the recorded metrics (`megatron-stare bisect`)."""
