"""Samples responses: engines, their weights' state, sampling noise, and the way from prompts to
batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before anything in here runs
