"""Typed configuration: `schema.py` defines the settings, `load.py` reads them."""
