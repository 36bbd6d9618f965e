"""`bisect`: a run's steps made again with one cause changed at a time, and which of them explains
the record."""
