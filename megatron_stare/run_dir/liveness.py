"""Determines from a run's lock and heartbeat whether the run is alive.

The functions of this module never change a run. The driver holds the run's lock. If the driver ends
for any reason, the kernel frees the lock. If any machine finds the lock held, the run is alive. If
the driver's machine finds the lock free, the run is not alive. On any other machine, the lock can
seem free although the run is alive, because some file systems do not share locks between machines.
If another machine finds the lock free, the heartbeat's age shows whether the run is alive.
"""

from __future__ import annotations

import fcntl
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_stare.run_dir.heartbeat import Beat, read_heartbeat
from megatron_stare.run_dir.run_files import LOCK_FILE, RunRecord

FRESH_S = 60.0  # greatest age of a live run's heartbeat, which is written every few seconds
State = Literal["running", "finished", "dead", "silent"]


@dataclass(frozen=True)
class Liveness:
    """Liveness of a run.

    `state`: "running", "finished", "dead" or "silent". "finished" means that all steps are done and
        the run's lock is free. "dead" means that the driver has ended before all steps were done.
        If the run's lock is free, the driver counts as ended in three cases: this machine is the
        driver's machine, `host` is unknown, or the watcher saw that the driver's process ended. An
        unfinished run is "silent" if three conditions are met: the run's lock seems free, the
        driver does not count as ended, and no heartbeat was written in the last FRESH_S seconds.
        The driver of a silent run is on another machine.
    `host`: name of the machine on which the driver ran last; "" if unknown.
    `beat`, `beat_age_s`: the newest heartbeat, and its age by this machine's clock. `beat` and
        `beat_age_s` are None if there is no heartbeat.
    """

    state: State
    host: str = ""
    beat: Beat | None = None
    beat_age_s: float | None = None


def liveness(run: RunRecord, now: float | None = None, here: str | None = None) -> Liveness:
    """Determines a run's liveness.

    Args:
        now: seconds since 1970; None for the current time.
        here: name of this machine; None for the machine's host name.
    """
    now, here = time.time() if now is None else now, here or socket.gethostname()
    beat = read_heartbeat(run.directory)
    host = beat.host if beat else str(run.starts[-1].get("host", "")) if run.starts else ""
    age = None if beat is None else max(0.0, now - (beat.written or beat.since))
    planned = run.setting("run.steps")
    made = run.metrics[-1]["step"] if run.metrics else 0
    if lock_held(run.directory):
        state: State = "running"
    elif isinstance(planned, int) and made >= planned:
        state = "finished"
    elif host in ("", here) or (beat is not None and beat.process == "ended"):
        state = "dead"
    else:
        state = "running" if age is not None and age < FRESH_S else "silent"
    return Liveness(state, host, beat, age)


def lock_held(run_dir: Path) -> bool:
    """Tells whether a process holds the run's lock.

    Tests the run's lock by taking the lock in shared mode for some microseconds. A driver that
    tries to take the lock during these microseconds fails and retries (run_state.py).
    """
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False


def how_it_stands(run: RunRecord, now: float | None = None, here: str | None = None) -> str:
    """Describes, in a sentence for the report, whether an unfinished run is still alive. Returns ""
    if the run is finished or the run's number of steps is unknown."""
    planned = run.setting("run.steps")
    made = int(run.metrics[-1]["step"]) if run.metrics else 0
    if not isinstance(planned, int) or made >= planned:
        return ""
    found = liveness(run, now, here)
    drawn = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now))
    steps = f"step {made} of {planned}"
    if found.state == "running":
        phase = f", in {found.beat.phase}" if found.beat and found.beat.phase else ""
        return f"Drawn {drawn}, while the run goes on: {steps} is made{phase}."
    if found.state == "silent":
        heard = (
            f"its last heartbeat is {found.beat_age_s:,.0f} s old"
            if found.beat_age_s is not None
            else "no heartbeat"
        )
        return (
            f"Drawn {drawn}; {steps} is made, and whether the run on {found.host} goes on cannot be"
            f" seen ({heard})."
        )
    return f"Drawn {drawn}; the run does not go on, {steps} was the last."
