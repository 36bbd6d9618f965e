"""Agreement between the log-probs of engine and trainer, and the limits on their difference."""
