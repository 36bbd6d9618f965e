"""The driver: opens or resumes a run, owns its workers and files, trains step by step, and guards,
saves and evaluates the run."""
