"""Exports the ranks' shards as whole weights under Hugging Face names, either to the engines or to
files."""
