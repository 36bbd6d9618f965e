"""The black box is a process beside a run. A hang of the run cannot stop this process. The process
records where the run hangs.

Only `driver_side.py` imports torch; the driver and its workers use this module. No module of this
package imports Ray. The watcher and its agents on other nodes are small and start fast.
"""
