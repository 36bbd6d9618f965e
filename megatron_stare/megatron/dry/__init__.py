"""Dry models: the layout of ranks and parameters without memory, for plan and preflight."""
