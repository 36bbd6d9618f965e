"""Agreement of engine and trainer log-probs, and the limits a run holds them to."""
