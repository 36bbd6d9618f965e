"""The black box: a process beside a run, which no hang of the run can stop. The process records
where the run hangs.

Only `driver_side.py`, which the driver and its workers use, imports torch; no file here imports
Ray. The watcher and its agents on other nodes are small and start fast.
"""
