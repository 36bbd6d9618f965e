"""The black box: a process beside a run that records where the run hangs, and that no hang can
stop.

Only `driver_side.py`, which the driver and its workers use, imports torch; no file here imports
Ray. The watcher and its agents on other nodes are small and start fast.
"""
