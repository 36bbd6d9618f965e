"""Exports weights from the ranks' shards to files under Hugging Face names, or to the engines."""
