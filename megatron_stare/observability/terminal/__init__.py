"""The terminal: plain lines of progress, and the live panel."""
