"""Compares the log-probs of engine and trainer, and sets limits on the differences."""
