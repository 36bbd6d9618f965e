"""Operators over sharded tensors and ranks, and the planning of micro-batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs
