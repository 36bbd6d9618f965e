"""Samples responses: rollout engines, the state of their weights, sampling noise, and the path from
prompts to batches."""

from megatron_stare.process.vector_maths import settle

settle()  # before any code of this package runs
