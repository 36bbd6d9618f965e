"""Weights out of a rank's shards: under Hugging Face names, by stage, to the engines."""
