"""Models without memory: the layout of ranks and parameters, for plan and preflight."""
