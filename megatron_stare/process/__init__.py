"""Handles one operating-system process and its surroundings: signals, time limit, addresses,
memory, installed packages."""
