"""Shows a run on a terminal: plain lines of progress, or the live panel."""
