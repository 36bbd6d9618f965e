"""Operators over sharded tensors and ranks, and the cutting of a batch into micro-batches."""
