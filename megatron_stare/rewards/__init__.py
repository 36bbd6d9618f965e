"""Contains the verifiers and the worker processes that run them."""
