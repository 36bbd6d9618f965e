"""Builds the run report. `page.py` prepares the content of `page.html.jinja`, and `charts.py` draws
the pictures."""
