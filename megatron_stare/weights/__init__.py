"""Weights in files and in transit: folders, checkpoints, the stream. Callers pass in process
groups."""
