"""Places the workers. `inline.py` runs the workers in the driver, and `ray.py` runs the workers in
Ray actors. The driver uses only `trainer_group.py`."""
