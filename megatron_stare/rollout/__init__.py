"""Samples responses: engines, their weights' state, sampling noise, and the way from prompts to Samples."""
