"""Commands of the command line, except `plan`."""
