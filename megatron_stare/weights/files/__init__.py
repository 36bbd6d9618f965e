"""Weights in files: Hugging Face folders, distributed checkpoints, conversion, checksums."""
