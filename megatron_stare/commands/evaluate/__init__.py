"""Evaluates a run or model folder on problems, and resumes interrupted evaluations (`megatron-stare
eval`)."""
