"""Builds the run report. `page.py` prepares the content, `charts.py` draws the charts, and
`page.html.jinja` lays out the page."""
