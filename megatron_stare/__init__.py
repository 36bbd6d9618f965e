"""STARE and its relatives on Megatron: stable reinforcement learning of reasoning models."""

__version__ = "0.2.0"
