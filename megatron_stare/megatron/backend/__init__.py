"""Megatron on this device: process groups and layout, and what a CPU answers for CUDA."""
