"""Defines the sink, which is the interface of every component that records a run's reports."""
