"""Typed configuration. `schema.py` defines the settings, and `load.py` reads configurations."""
