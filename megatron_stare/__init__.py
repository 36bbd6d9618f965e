"""Stable reinforcement learning of reasoning models on Megatron, with STARE and related methods."""

__version__ = "0.2.0"
