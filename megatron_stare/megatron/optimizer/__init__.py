"""Optimizers: Adam with master weights, distributed state, loss scale, offload to the host."""
