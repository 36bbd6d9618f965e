"""Adapts Megatron to this rank's device. Contains the parallel layout with its process groups, and
the CPU substitutes for CUDA calls."""
