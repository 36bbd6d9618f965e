"""Gathers the ranks' shards of the weights, and exports whole weights to the engines, or to files
under Hugging Face names."""
