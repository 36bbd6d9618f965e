"""Computes log-probs, entropies and statistics of a batch, from tensors that can be sharded over
ranks. Also splits a batch into micro-batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs
