"""Compares the engine's log-probs with the trainer's log-probs, and sets limits on the
differences."""
