"""Chooses settings of Ray's processes, watches the processes of a locally started Ray, and ends the
processes that Ray leaves behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from megatron_stare.errors import UserError
from megatron_stare.process.workers import WorkerLostError

NEEDED = {"raylet": "agent (raylet)", "gcs_server": "control store (GCS)"}
# environment variables of the driver's Ray processes; scripts/ray_up.sh sets them on the nodes
EVERY_RAY = {
    # milliseconds between reports of calls. 0: none; otherwise Ray's control store records the last
    # 100,000 calls and grows for days
    "RAY_task_events_report_interval_ms": "0",
}
# environment variables of a Ray that this process starts
STARTED = {
    # Ray's future default; without it Ray prints a notice
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # do not start idle workers, which take memory
    "RAY_prestart_worker_first_driver": "0",
}
AGENT = "RAY_RAYLET_PID"  # variable in the environment of processes that the raylet starts
DEATH_S = 10.0  # seconds within which Ray notices the death of a process
LOOK_S = 0.1  # seconds between two queries of Ray's state
TMPDIR_BYTES = 39  # longer, Ray's paths of sockets below it have more than the 107 bytes allowed
LEFT_S = 10.0  # seconds that workers get to end after their raylet has ended


def prefer(variables: Mapping[str, str]) -> None:
    """Sets environment variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def own_folder() -> str:
    """Returns the folder for the sockets and logs of a Ray that this process starts. As in Ray's
    default, the folder is the subfolder `ray` of a temporary directory. The environment variable
    RAY_TMPDIR sets the temporary directory. If RAY_TMPDIR is not set, TMPDIR sets the temporary
    directory. If neither variable is set, the temporary directory is /tmp. A TMPDIR whose path is
    too long for sockets, as on many Slurm clusters, is ignored."""
    place = os.environ.get("TMPDIR", "/tmp")
    if len(os.fsencode(place)) > TMPDIR_BYTES:
        place = "/tmp"
    return os.path.join(os.environ.get("RAY_TMPDIR", place), "ray")


def ended(node: Any) -> str | None:
    """Returns a message if an essential Ray process has ended, or None if all are alive.

    Args:
        node: Ray's record of the processes that Ray started on this machine, or None if Ray started
            no processes.
    """
    dead = () if node is None else node.dead_processes()
    return next(
        (f"Ray's {NEEDED[kind]} on this machine has ended" for kind, _ in dead if kind in NEEDED),
        None,
    )


def half_started(error: BaseException) -> Any:
    """Returns Ray's record of the processes that a failed start of Ray left behind, or None if
    there is no such record.

    A failed start of Ray can leave processes behind. The function `undo` ends these processes.
    Without a call of `undo`, these processes run until this Python process ends. Ray does not
    return the record after a failed start. The record is a Python object. If `error` was raised in
    a method of the record, or passed through it, the traceback of `error` contains the stack frame
    of this method. In this frame, the local variable `self` is the record. `half_started` therefore
    searches the traceback for the record.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = (frame.f_locals.get("self") for frame in frames)
    return next((each for each in owners if hasattr(each, "dead_processes")), None)


@contextlib.contextmanager
def nothing_left(node: Any) -> Iterator[None]:
    """Context manager for a `with` block that shuts Ray down. If the raylet or the GCS server ended
    before the shutdown, the shutdown does not end the worker processes that the raylet started.
    After such a shutdown, the context manager waits up to `LEFT_S` seconds for the worker processes
    to end, and then kills the worker processes that still run."""
    broken = ended(node) is not None
    agents = [each.process.pid for each in node.all_processes.get("raylet", ())] if broken else []
    started = [process for agent in agents for process in _below(agent)]
    yield
    if not broken:
        return
    # also find the workers of a dead raylet, which are no longer its children
    workers = {
        *started,
        *(process for process in psutil.process_iter() if _agent_of(process) in agents),
    }
    _, left = psutil.wait_procs([*workers], timeout=LEFT_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=LEFT_S)


def undo(half: Any) -> None:
    """Ends the processes that a failed start of Ray left behind. The argument `half` is the value
    that `half_started` returned. If `half` is None, `undo` does nothing."""
    if half is not None:
        with nothing_left(half):
            half.kill_all_processes(check_alive=False, wait=True)


def loss_behind(
    error: Exception, node: Any, died: Callable[[], int | None], what: str
) -> WorkerLostError | None:
    """Checks whether a lost process caused an error. Returns a WorkerLostError that names the lost
    process. Returns None if no process was lost, or if the error already is a WorkerLostError.

    Args:
        died: a function that returns the index of a worker that Ray knows to be dead, or None.
        what: the name of the workers in error messages.
    """
    if isinstance(error, WorkerLostError):
        return None
    # A caller may notice a dead process before Ray does. A UserError is reported without waiting.
    until = time.monotonic() + (0.0 if isinstance(error, UserError) else DEATH_S)
    while True:
        if (gone := ended(node)) is not None:
            return WorkerLostError(gone)
        if (number := died()) is not None:
            return WorkerLostError(f"{what} {number} died")
        if time.monotonic() >= until:
            return None
        time.sleep(LOOK_S)


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _agent_of(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error, OSError, LookupError, ValueError):
        return int(process.environ()[AGENT])
    return None


@contextlib.contextmanager
def own_group() -> Iterator[None]:
    """Context manager in which new processes are started in a separate process group.

    A shell or the command `timeout` sends a signal to a whole process group. A signal to Ray's
    processes would immediately end them and the ranks, but the ranks must first save the last step.
    The leader of a session cannot move to another process group. If the current process is the
    leader of its session, new processes stay in the process group of the current process.
    """
    mine = os.getpgrp()
    # keeps the new process group alive
    leader = subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp)
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, leader.pid)
        yield
    finally:
        with contextlib.suppress(OSError):
            os.setpgid(0, mine)
        leader.kill()
        leader.wait()
