"""Turns a rank's share of a rollout batch into the micro-batches of its model."""
