"""Manages one operating-system process: its signals, time limit, network addresses, memory and
installed packages."""
