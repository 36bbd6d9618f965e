"""Runs Megatron on this device: process groups and layout, and CPU substitutes for CUDA calls."""
