"""Liveness of a run, by its lock, and by the heartbeat that it leaves for whoever looks from
elsewhere.

Nothing here changes a run. The lock is held by the driver and freed by the kernel when it ends,
however it ends; it is the truth on the driver's machine. On another one a lock that is held says
the same where the file system passes locks on, and one that is free says nothing, so there the
heartbeat's age decides.
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

FRESH_S = 60.0  # a heartbeat is written every few seconds; older than this, something is wrong
State = Literal["running", "finished", "dead", "silent"]


@dataclass(frozen=True)
class Liveness:
    """How a run stands.

    state: "running", "finished" (all steps are made), "dead": no process holds it, "silent": of a
        run on another machine nothing was heard for FRESH_S, or ever.
    host: where it was started last; "" where it did not note that.
    beat, beat_age_s: the newest heartbeat, and how old it is by this machine's clock; None: there
    is none.
    """

    state: State
    host: str = ""
    beat: Beat | None = None
    beat_age_s: float | None = None


def liveness(run: RunRecord, now: float | None = None, here: str | None = None) -> Liveness:
    """Liveness of the run in a directory.

    Args:
        now: seconds since 1970; default: now.
        here: the name of this machine.
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
    """Tells whether a process holds the run.

    The lock is asked for, shared, for some microseconds; a driver that takes it meanwhile tries
    again (run_state.py).
    """
    try:
        with (run_dir / LOCK_FILE).open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError:  # there is none, or its file system has no locks
        return False
    return False


def how_it_stands(run: RunRecord, now: float | None = None, here: str | None = None) -> str:
    """A sentence for a page that is drawn of a run that is not finished; "" for one that is, or of
    which the steps that it was to make are not known."""
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
