"""The commands beside `train` and `plan`."""
