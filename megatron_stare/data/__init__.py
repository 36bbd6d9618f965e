"""Prompts: where they come from, in order, resumable."""
