"""Commands other than `train` and `plan`."""
