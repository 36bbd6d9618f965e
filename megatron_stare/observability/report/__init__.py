"""The run report: `page.py` makes what `page.html.jinja` shows, `charts.py` its pictures."""
