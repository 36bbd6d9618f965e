"""The black box: a process beside a run that no hang of the run can stop, and that writes down where it hangs.

Nothing here but `driver_beats.py` and `driver_side.py`, which the driver uses, imports torch, and nothing Ray: the
watcher and its agents on other nodes are small, and start in a blink.
"""
