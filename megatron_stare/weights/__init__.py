"""Weights in files and on their way: folders, checkpoints, the stream. Process groups come as
arguments."""
