"""What is found out, and written, where a run does not get on: by a process beside it that no hang of it can stop.

Nothing here but `driver_beats.py` and `driver_side.py`, which the driver uses, imports torch, and nothing Ray: the
watcher and its agents on other nodes are small, and start in a blink.
"""
