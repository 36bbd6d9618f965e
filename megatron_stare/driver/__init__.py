"""The driver: opens or resumes a run, holds what it needs, trains step by step, guards, saves and
evaluates it."""
