"""`megatron-stare eval` evaluates a run or model folder on problems, and resumes interrupted
evaluations."""
