"""Samples responses. Contains the rollout engines, the states of an engine, the sampling noise, and
the code that turns prompts into batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before any code of this package runs
