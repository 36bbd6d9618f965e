"""A verifier module that cannot be imported."""

raise RuntimeError("licence file not found")
