"""Writes and reads heartbeats. Heartbeats are small files with a run's progress. A heartbeat can be
read even if a disk stalls, if the process that wrote the heartbeat is stopped, or if a thread of
the writing process is deadlocked.

A process of a run writes its own Beat whenever a phase or call begins or ends. The driver writes a
Beat; with Ray, each rank and each engine also writes a Beat. Each Beat is one file. The Beat files
are in the node's memory (under /dev/shm), or in the temporary folder if /dev/shm is not writable.
The watcher, a separate process (hangs/watcher.py), reads the Beats. The watcher copies the driver's
Beat to heartbeat.json in the run directory, so that other machines can read the driver's Beat too.
This module imports only Python's standard library, so that the watcher starts fast and needs little
memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEARTBEAT_FILE = "heartbeat.json"  # in the run directory
COPY_S = 5.0  # between two writes of that file by the watcher of a live run
DRIVER = "driver"
BETWEEN = "between phases"  # the driver logs, polls a checkpoint, or has not begun yet
IDLE = ""  # phase of a rank or engine without a call
# environment variable with the folder of the beats
FOLDER_VARIABLE = "MEGATRON_STARE_BEATS"
# file in that folder with the driver's requests to engines; see rollout/fleet/dispatch.py
REQUESTS = "requests.json"
RANK = "trainer rank "  # prefix of a rank's role
# least seconds between writes, since thousands of responses or micro-batches may finish quickly
PROGRESS_S = 0.2

_told: Callable[[], None] | None = None  # called when this process makes progress


def watch_progress(told: Callable[[], None] | None) -> None:
    """Sets the callback `told`, which runs whenever this process reports progress. If `told` is
    None, there is no callback."""
    global _told
    _told = told


def tell_progress() -> None:
    """Reports progress of this process's current call, such as a finished micro-batch."""
    if _told is not None:
        _told()


@dataclass(frozen=True)
class Beat:
    """Progress of one process of a run.

    Args:
        role: for example "driver", "trainer rank 3" or "rollout engine 0".
        pid: process id on `host`.
        phase: phase of the driver, or current call of a rank or engine. IDLE means that the rank or
            engine has no call.
        since: start of the phase, seconds since 1970.
        moved: time of the last progress in the phase, seconds of the host's CLOCK_MONOTONIC.
            Progress is the start of the phase, a finished response or a finished micro-batch.
        limit_s: seconds within which the phase must make progress. None means that the phase has no
            limit of its own.
        step: current or last step; 0 before the first step.
        steps: number of steps of the run; 0: unknown.
        done: number of responses, out of `total`, that are finished in the phase. `done` and
            `total` are 0 if the phase counts no responses.
        step_s: durations of the latest steps in seconds, oldest first, without evaluations and
            checkpoints.
        tokens_per_s: response tokens per second of the newest step; None before the first step is
            done.
        begun: time at which the process began to work for the run, seconds since 1970.
        written: time at which the watcher last copied the beat, seconds since 1970. `written` is 0
            in the original beat in the node's memory.
        process: last state of the process that the watcher saw, such as "running", "sleeping",
            "stopped" or "ended". `process` is "" until the watcher has looked at the process.
        black_box: folder of the newest black-box bundle (docs/black_box.md), or "" if there is no
            bundle.
    """

    role: str
    pid: int
    phase: str
    since: float
    moved: float
    host: str = field(default_factory=socket.gethostname)
    limit_s: float | None = None
    step: int = 0
    steps: int = 0
    done: int = 0
    total: int = 0
    step_s: tuple[float, ...] = ()
    tokens_per_s: float | None = None
    begun: float = 0.0
    written: float = 0.0
    process: str = ""
    black_box: str = ""


def write_beat(file: Path, beat: Beat) -> None:
    """Writes a beat atomically. Raises OSError."""
    write_whole(file, vars(beat))


def write_whole(file: Path, value: Any) -> None:
    """Writes JSON atomically. Readers see either the file's old content or its new content. Raises
    OSError."""
    # not Path's methods, which take three times as long; this runs many times per step
    temporary = f"{file}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, json.dumps(value).encode())
    finally:
        os.close(descriptor)
    os.replace(temporary, file)


def read_beat(file: Path) -> Beat | None:
    """Reads a beat. Returns None if the file is missing or unreadable."""
    try:
        told = json.loads(file.read_text())
        known = {each.name for each in dataclasses.fields(Beat)}
        told["step_s"] = tuple(told.get("step_s", ()))
        return Beat(**{name: value for name, value in told.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_heartbeat(run_dir: Path) -> Beat | None:
    """Reads the driver's beat from a run directory. The watcher updates heartbeat.json every few
    seconds while the run is alive."""
    return read_beat(run_dir / HEARTBEAT_FILE)


def forget_heartbeat(run_dir: Path) -> None:
    """Removes the file heartbeat.json that an earlier start of the run left behind. This old file
    describes the driver of the earlier start. A watcher would overwrite the old file. A driver
    without a watcher calls this function instead. Otherwise, the old file would continue to
    describe a process that no longer exists."""
    (run_dir / HEARTBEAT_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def beating(run_dir: Path, phase: str) -> Iterator[None]:
    """Context manager for a driver whose watcher has ended and whose next watcher has not started
    yet. When a watcher ends, the watcher writes to heartbeat.json that the driver has ended. To
    show other machines that the driver is still alive, a thread rewrites heartbeat.json every
    COPY_S seconds inside the `with` block. The rewritten heartbeat contains the phase `phase`.

    If the block raises an error, the context manager writes a last heartbeat, which says that the
    driver has ended. Does nothing if heartbeat.json is missing or describes another process.
    """
    beat = read_heartbeat(run_dir)
    if beat is None or (beat.host, beat.pid) != (socket.gethostname(), os.getpid()):
        yield
        return
    began = time.time()
    beat = dataclasses.replace(beat, phase=phase, since=began, limit_s=None, done=0, total=0)

    def put(process: str) -> None:
        with contextlib.suppress(OSError):  # the restart must not fail because of the heartbeat
            now = dataclasses.replace(
                beat, written=time.time(), moved=time.monotonic(), process=process
            )
            write_beat(run_dir / HEARTBEAT_FILE, now)

    left = threading.Event()

    def run() -> None:
        put("running")
        while not left.wait(COPY_S):
            put("running")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        left.set()
        thread.join()
        put("ended")
        raise
    left.set()
    thread.join()


def beats_of(folder: Path) -> list[Beat]:
    """Returns the beats of all processes on this node, sorted by role."""
    found = [read_beat(file) for file in folder.glob("beat_*.json")]
    return sorted(
        (beat for beat in found if beat is not None), key=lambda beat: (len(beat.role), beat.role)
    )


def newest_progress(folder: Path) -> float | None:
    """Returns the time of the newest progress of any rank on this node, in seconds of
    CLOCK_MONOTONIC. Ignores idle ranks, which are executing no call. Returns None if all ranks on
    this node are idle."""
    return max(
        (b.moved for b in beats_of(folder) if b.role.startswith(RANK) and b.phase != IDLE),
        default=None,
    )


def beat_file(folder: Path, role: str) -> Path:
    """Returns the path of the file that contains a role's beat."""
    return folder / f"beat_{role.replace(' ', '_')}.json"


class CallBeats:
    """Writes the beats of a worker. A beat contains the worker's current call and the time at which
    the call last made progress.

    Args:
        folder: folder of the beats. If `folder` is None, nothing is written.
        clock: must be the watcher's clock.
    """

    def __init__(
        self, folder: Path | None, role: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._clock = None if folder is None else beat_file(folder, role), clock
        now = time.time()
        self._beat = Beat(role, os.getpid(), IDLE, now, clock(), begun=now)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Context manager. Inside the `with` block, the worker's Beat says that the worker's
        current call is `name`."""
        self._put(phase=name, since=time.time())
        watch_progress(self._progress)
        try:
            yield
        finally:
            watch_progress(None)
            self._put(phase=IDLE, since=time.time())

    def _progress(self) -> None:
        if self._clock() - self._beat.moved >= PROGRESS_S:
            self._put()

    def _put(self, **known: Any) -> None:
        self._beat = dataclasses.replace(self._beat, moved=self._clock(), **known)
        # OSError: the folder is gone, because the run has ended
        with contextlib.suppress(OSError):
            if self._file is not None:
                write_beat(self._file, self._beat)
