"""Builds models that take no memory, so that plan and preflight can examine a layout of ranks and
parameters."""
