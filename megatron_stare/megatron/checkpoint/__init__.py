"""Distributed checkpoints of a run: written in the background, loaded in any layout."""
