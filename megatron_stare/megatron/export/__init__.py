"""Exports the ranks' shards as whole weights, either to the engines or to files under Hugging Face
names."""
