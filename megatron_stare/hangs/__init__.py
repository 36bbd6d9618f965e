"""The black box: a process beside a run that no hang of the run can stop, and that writes down
where it hangs.

Only `driver_side.py`, which the driver and its workers use, imports torch; no file here imports
Ray. The watcher and its agents on other nodes are small, and start in a blink.
"""
