"""Writes a run's distributed checkpoints in the background and loads them in any layout."""
