"""Typed configuration: `schema.py` says what there is, `load.py` reads it."""
