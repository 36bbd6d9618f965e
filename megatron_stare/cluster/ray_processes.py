"""The processes of a Ray that was started here: whether they are all there, and that none of them
stays."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from megatron_stare.errors import UserError
from megatron_stare.process.workers import WorkerLostError

NEEDED = {"raylet": "agent (raylet)", "gcs_server": "control store (GCS)"}
AGENT = "RAY_RAYLET_PID"  # in the environment of what the agent starts
DEATH_S = 10.0  # in which Ray knows of a process that died
LOOK_S = 0.1  # between two looks at what it knows
LEFT_S = 10.0  # that workers are given to end when their agent has


def ended(node: Any) -> str | None:
    """Which process has ended that nothing goes on without, in words.

    Args:
        node: Ray's own record of what it started here; None: nothing.
    """
    dead = () if node is None else node.dead_processes()
    return next(
        (f"Ray's {NEEDED[kind]} on this machine has ended" for kind, _ in dead if kind in NEEDED),
        None,
    )


def half_started(error: BaseException) -> Any:
    """Ray's own record of what it had started when its start ended in this error, which nothing but
    the frames of that start holds; None: it had come to none. Ray leaves those processes there
    until this one ends."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = (frame.f_locals.get("self") for frame in frames)
    return next((each for each in owners if hasattr(each, "dead_processes")), None)


@contextlib.contextmanager
def nothing_left(node: Any) -> Iterator[None]:
    """While open, Ray is shut down. Where one of its processes was lost before, nobody tells its
    workers to end, and those that do not by themselves are killed."""
    broken = ended(node) is not None
    agents = [each.process.pid for each in node.all_processes.get("raylet", ())] if broken else []
    started = [process for agent in agents for process in _below(agent)]
    yield
    if not broken:
        return
    # of an agent that has died already, whose children are its no more
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
    """Ends what is there of a start that failed, as Ray's own record says it; None: nothing was
    started."""
    if half is not None:
        with nothing_left(half):
            half.kill_all_processes(check_alive=False, wait=True)


def loss_behind(
    error: Exception, node: Any, died: Callable[[], int | None], what: str
) -> WorkerLostError | None:
    """Which process was lost, where an error came of it; None: it says so itself, or none was.

    Args:
        died: the number of a worker that has died, as far as Ray has told.
        what: these workers are called in errors.
    """
    if isinstance(error, WorkerLostError):
        return None
    # A caller sees a dead process before Ray does. An error of the user's is not kept waiting.
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
    """While open, processes that are started are in a process group of their own, and stay there.

    A shell, and `timeout`, signal a whole group. Ray's processes would end at once, and with them
    the ranks that are to save the last step. A process that leads its session cannot leave its
    group, and there they stay in it.
    """
    mine = os.getpgrp()
    # a process group exists while it has a member
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
