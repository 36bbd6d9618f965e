"""Adapts Megatron to this device. Contains the process groups and the layout, and CPU substitutes
for CUDA calls."""
