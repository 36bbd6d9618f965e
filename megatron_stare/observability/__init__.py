"""Defines the sink, the interface of everything that records a run's reports."""
