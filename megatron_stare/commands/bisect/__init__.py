"""Searches for the cause that explains a run's recorded metrics (`megatron-stare bisect`). Repeats
steps of the run, first without a change, then with one change per re-run."""
