"""Builds models on the meta device, without memory, so that `plan` and the preflight checks can
find the parameters of each rank."""
