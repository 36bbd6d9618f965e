"""Computes log-probs, entropies and batch statistics from tensors that are sharded over ranks, and
plans micro-batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs
