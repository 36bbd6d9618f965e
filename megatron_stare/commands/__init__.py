"""Implements the commands of the command line, except `plan`, which planning/command.py
implements."""
