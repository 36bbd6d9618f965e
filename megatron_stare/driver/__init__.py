"""The driver of a run. It opens or resumes the run and owns the workers and files. It trains step
by step, and it guards, saves and evaluates the run."""
