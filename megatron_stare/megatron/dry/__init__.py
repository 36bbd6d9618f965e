"""Builds models that take no memory, to find the layout of ranks and parameters for plan and
preflight."""
