"""The black box is a separate process, which records where a run hangs. A hang of the run cannot
stop the black box.

Only the driver and its workers import `driver_side.py`, which imports torch. No other module of
this package imports torch, and no module of this package imports Ray. The watcher and its agents on
other nodes import neither torch nor Ray, and therefore need little memory and start fast.
"""
