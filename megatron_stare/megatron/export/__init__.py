"""Exports weights from a rank's shards: under Hugging Face names, by stage, or to the engines."""
