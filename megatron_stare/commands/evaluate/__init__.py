"""`megatron-stare eval`: evaluates a run or a model folder on problems, and resumes an
evaluation."""
