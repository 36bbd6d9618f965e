"""Progress of a run, in small files that a stalled disk, a stopped process or a deadlocked thread
cannot hold back.

Every process of a run - the driver, and with Ray each rank and engine - writes a Beat of its own
into a folder in its node's memory, as each phase or call begins and ends. The watcher
(hangs/watcher.py), a process of its own, reads them, and copies the driver's into the run
directory: heartbeat.json, for whoever asks how a run stands, on another machine too. Imports
neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEARTBEAT_FILE = "heartbeat.json"  # in the run directory
DRIVER = "driver"
BETWEEN = "between phases"  # the driver logs, looks after a checkpoint, or has not begun yet
IDLE = ""  # the phase of a rank or engine that nothing is asked of
# the environment variable that tells a process of a run the folder
FOLDER_VARIABLE = "MEGATRON_STARE_BEATS"
# file in that folder with the driver's requests to engines; see rollout/fleet/dispatch.py
REQUESTS = "requests.json"
RANK = "trainer rank "  # the role of a rank begins so
# least seconds between notes of progress: responses and micro-batches may come by the thousand
PROGRESS_S = 0.2

_told: Callable[[], None] | None = None  # of this process's progress


def watch_progress(told: Callable[[], None] | None) -> None:
    """Sets who is told that the call under way in this process gets on; None: nobody."""
    global _told
    _told = told


def tell_progress() -> None:
    """Tells whoever watches this process that the call under way gets on, with a micro-batch for
    instance."""
    if _told is not None:
        _told()


@dataclass(frozen=True)
class Beat:
    """Progress of one process of a run.

    Args:
        role: "driver", "trainer rank 3", "rollout engine 0".
        pid: on `host`.
        phase: of the driver, or the call that a rank or engine is in; IDLE: it is in none.
        since: when that began, seconds since 1970.
        moved: when it last got on, seconds of the host's CLOCK_MONOTONIC: it began, or a response
            or a micro-batch was finished in it.
        limit_s: in which it must get on; None: it has no limit of its own.
        step: that is under way or was the last; 0: none yet.
        steps: that the run has; 0: not known.
        done: responses finished in the phase, of `total`; 0 of 0: none are counted.
        step_s: seconds of each of the newest steps, oldest first, evaluations and checkpoints left
            out.
        tokens_per_s: response tokens a second of the newest step; None: there is none.
        begun: when the process began to work for the run, seconds since 1970.
        written: when the watcher last saw to it, seconds since 1970; 0 in the node's memory.
        process: how the watcher last found the process: "running", "sleeping", "stopped", "ended"
            and so on; "" before.
        black_box: the folder of the newest bundle (docs/black_box.md); "" where there is none.
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
    """Readers see the beat before or this one. Raises OSError."""
    write_whole(file, vars(beat))


def write_whole(file: Path, value: Any) -> None:
    """Writes JSON in one go: whoever reads it meanwhile sees what was there before. Raises
    OSError."""
    # not Path's own ways, which take three times as long: this is done many times a step
    temporary = f"{file}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, json.dumps(value).encode())
    finally:
        os.close(descriptor)
    os.replace(temporary, file)


def read_beat(file: Path) -> Beat | None:
    """None where there is none, or none that can be read."""
    try:
        told = json.loads(file.read_text())
        known = {each.name for each in dataclasses.fields(Beat)}
        told["step_s"] = tuple(told.get("step_s", ()))
        return Beat(**{name: value for name, value in told.items() if name in known})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def read_heartbeat(run_dir: Path) -> Beat | None:
    """The driver's newest beat that the watcher copied into a run directory, every few seconds
    while the run lives."""
    return read_beat(run_dir / HEARTBEAT_FILE)


def beats_of(folder: Path) -> list[Beat]:
    """Beats of all processes of this node, by role."""
    found = [read_beat(file) for file in folder.glob("beat_*.json")]
    return sorted(
        (beat for beat in found if beat is not None), key=lambda beat: (len(beat.role), beat.role)
    )


def newest_progress(folder: Path) -> float | None:
    """When a rank of this node last got on with a call that it is in, seconds of CLOCK_MONOTONIC;
    None: no rank is in one."""
    return max(
        (b.moved for b in beats_of(folder) if b.role.startswith(RANK) and b.phase != IDLE),
        default=None,
    )


def beat_file(folder: Path, role: str) -> Path:
    """File that the process of a role writes its beat into."""
    return folder / f"beat_{role.replace(' ', '_')}.json"


class CallBeats:
    """The beats of a worker: which call it is in, and when that call last got on.

    Args:
        folder: None: nobody watches, and nothing is written.
        clock: that the watcher reads too.
    """

    def __init__(
        self, folder: Path | None, role: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._clock = None if folder is None else beat_file(folder, role), clock
        now = time.time()
        self._beat = Beat(role, os.getpid(), IDLE, now, clock(), begun=now)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """While open, the worker is in this call."""
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
        # OSError: the folder is gone, because the run is over
        with contextlib.suppress(OSError):
            if self._file is not None:
                write_beat(self._file, self._beat)
