"""Reads, writes, converts and verifies weights in Hugging Face folders and distributed
checkpoints."""
