"""Repeats steps of a run with one cause changed at a time, and names the cause that explains the
record (`megatron-stare bisect`)."""
