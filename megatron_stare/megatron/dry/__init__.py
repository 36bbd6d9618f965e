"""Builds models on the meta device, without memory, so that plan and preflight can examine which
parameters each rank of a layout holds."""
