"""The driver of a run. The driver starts or resumes the run, and owns the run's workers and files.
The driver trains step by step, checks each step with guards, saves checkpoints, and evaluates the
policy."""
