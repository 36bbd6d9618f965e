"""Shows a run on a terminal, as plain lines of progress or as the live panel."""
