"""Runs one training step on a rank: passes, statistics, loss, gradients and measurements."""
