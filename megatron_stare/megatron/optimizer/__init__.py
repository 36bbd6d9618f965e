"""Builds the optimizer and handles master weights, distributed state, the loss scale and offload to
the host."""
