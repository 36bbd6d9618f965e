"""The run directory: writes and reads its files, and tells whether its run is alive."""
