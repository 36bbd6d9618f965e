"""Computes on tensors that are sharded over ranks, and plans micro-batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs
