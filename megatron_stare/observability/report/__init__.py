"""The run report: `page.py` prepares the content of `page.html.jinja`, `charts.py` its pictures."""
