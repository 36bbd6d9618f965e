"""The run directory: its files, what is written to them and read back, and whether its run is
alive."""
