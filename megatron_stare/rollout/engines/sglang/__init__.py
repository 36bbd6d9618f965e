"""Rollouts from real SGLang servers over HTTP: launching them, talking to them, and bringing them
new weights."""
