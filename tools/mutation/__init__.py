"""Mutation of the package: which wrong lines the tests notice."""
