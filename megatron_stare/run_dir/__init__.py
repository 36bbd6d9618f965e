"""Writes and reads the files of a run directory, and tells whether the run is alive."""
