"""Places the workers: `inline.py` in this process, `ray.py` in actors. The driver uses only
`trainer_group.py`."""
