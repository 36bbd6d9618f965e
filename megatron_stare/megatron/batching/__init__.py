"""Divides a rank's share of a rollout batch into micro-batches for the model on this rank."""
