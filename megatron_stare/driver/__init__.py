"""The driver of a run. The driver opens or resumes the run and owns the workers and files. The
driver trains step by step, and guards, saves and evaluates the run."""
