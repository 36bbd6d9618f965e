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

from megatron_stare.errors import UserError
from megatron_stare.process.interruption import pause
from megatron_stare.process.signs_of_life import say
from megatron_stare.run_dir.heartbeat import COPY_S, Beat, read_heartbeat
from megatron_stare.run_dir.run_files import LOCK_FILE, RunRecord

FRESH_S = 60.0  # greatest age of a live run's heartbeat, which is written every few seconds
SILENT_S = 3 * COPY_S  # without a new heartbeat after which a driver counts as gone
LOOK_S = 1.0  # between two reads of the heartbeat meanwhile
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
        The state can be "silent" only if the driver last ran on a machine other than this machine.
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
    """Tells whether a process holds the run's lock. See is_locked."""
    return is_locked(run_dir / LOCK_FILE)


def is_locked(file: Path) -> bool:
    """Tells whether a process holds the exclusive lock of a file.

    Tests the lock by taking the lock in shared mode for some microseconds. A driver that tries to
    take the lock during these microseconds fails and retries (run_state.py).
    """
    try:
        with file.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False


def refuse_alive_elsewhere(run_dir: Path) -> None:
    """Raises UserError if the run's driver is alive on another machine.

    Some file systems do not share locks between machines. On such a file system, the lock of a run
    can seem free although a driver on another machine holds the lock. This function therefore
    checks for new heartbeats: the watcher of a live driver rewrites the heartbeat every COPY_S
    seconds.

    The function returns at once in three cases: there is no heartbeat, the newest heartbeat is from
    this machine, or the newest heartbeat says that the driver has ended. In all other cases, the
    function waits up to SILENT_S seconds for a new heartbeat. A heartbeat is new if its time
    `written` has changed. The function compares only times that the other machine wrote, because
    the clocks of two machines may differ.
    """
    beat = read_heartbeat(run_dir)
    if beat is None or beat.process == "ended" or beat.host == socket.gethostname():
        return
    say(
        f"this run was last on {beat.host}: waiting {SILENT_S:g} s for a sign that it is alive"
        " there ...",
        always=True,
    )
    until = time.monotonic() + SILENT_S
    while (left := until - time.monotonic()) > 0:
        pause(min(LOOK_S, left))
        now = read_heartbeat(run_dir) or beat
        if now.process == "ended":
            return
        if now.written != beat.written:
            raise UserError(
                f"the run is alive on {now.host} (process {now.pid}), whose lock is not seen here",
                where=str(run_dir),
                fix=(
                    "end it there, or give another run.dir; a file system that shares locks between"
                    " machines refuses this at once (NFS: without nolock; Lustre: -o flock)"
                ),
            )


def how_it_stands(run: RunRecord) -> str:
    """Describes, in a sentence for the report, whether an unfinished run is still alive. Returns ""
    if the run is finished or the run's number of steps is unknown."""
    planned = run.setting("run.steps")
    made = int(run.metrics[-1]["step"]) if run.metrics else 0
    if not isinstance(planned, int) or made >= planned:
        return ""
    found = liveness(run)
    drawn = time.strftime("%Y-%m-%d %H:%M:%S %z")
    steps = f"step {made} of {planned}"
    if found.state == "running":
        phase = f", phase {found.beat.phase}" if found.beat and found.beat.phase else ""
        return f"Written {drawn}, while the run was running: {steps} done{phase}."
    if found.state == "silent":
        heard = (
            f"its last heartbeat is {found.beat_age_s:,.0f} s old"
            if found.beat_age_s is not None
            else "no heartbeat"
        )
        return (
            f"Written {drawn}: {steps} done. It is unknown whether the run is still running on"
            f" {found.host} ({heard})."
        )
    return f"Written {drawn}. The run is not running; it ended after {steps}."
