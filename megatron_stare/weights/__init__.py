"""Hugging Face names and layouts against Megatron's. Process groups come as arguments."""
