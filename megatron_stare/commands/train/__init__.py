"""`megatron-stare train`, and `megatron_stare.run`, which is the same from Python."""
