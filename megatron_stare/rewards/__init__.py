"""Verifiers, and the worker processes that run them."""
