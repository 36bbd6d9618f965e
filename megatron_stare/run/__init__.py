"""A run from its opening to its end: what is refused, what is read, what is continued, and all it holds open."""
