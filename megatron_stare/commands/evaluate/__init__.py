"""Evaluates a checkpoint or a Hugging Face model on tasks, and resumes interrupted evaluations
(`megatron-stare eval`)."""
