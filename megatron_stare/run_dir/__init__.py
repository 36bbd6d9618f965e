"""Writes and reads the files of a run directory, and finds out whether the run is alive."""
