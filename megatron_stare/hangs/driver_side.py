"""Starts and stops the watcher of a run or of `eval`, and writes the driver's heartbeats, called
beats.

The driver's beats contain the progress that a run reports to its sinks, and the time limit of the
current phase. Environment variables tell the workers where to write their heartbeats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_stare.config.fault_sections import HangsConfig
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.hangs import node_facts
from megatron_stare.hangs.nodes import LISTENING, LOCK, TOKEN, WATCHER, ensure
from megatron_stare.hangs.watcher import SETTINGS, TICK_S, Settings
from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.heartbeat import (
    BETWEEN,
    DRIVER,
    FOLDER_VARIABLE,
    PROGRESS_S,
    Beat,
    CallBeats,
    beat_file,
    forget_heartbeat,
    watch_progress,
    write_beat,
)

KEPT = 20  # durations of each phase, and steps
MEMORY = Path("/dev/shm")  # no disk can stall a folder in memory
PREFIX = "megatron-stare-beats-"
OLD_S = 60.0  # seconds after which a folder's watcher has started, or never will
START_S = 20.0  # until the watcher of a run on several nodes must listen
LEAVE_S = 5.0
CARRIED = (FOLDER_VARIABLE, WATCHER, TOKEN)


@dataclass
class _Phase:
    """An open phase. The fields `begun`, `entered` and `moved` are points in time, in seconds, as
    read from `clock`. The time of an inner phase does not count as time of the outer phase. When an
    inner phase ends, `end_phase` therefore moves the fields `entered` and `moved` of the outer
    phase forward by the duration of the inner phase."""

    name: str
    since: float  # seconds since 1970
    begun: float
    entered: float
    moved: float
    limit_s: float


class DriverBeats(Sink):
    """Sink that writes the driver's beats (heartbeats). The monitor calls `DriverBeats` like any
    other sink. The session also calls `DriverBeats` when a step or the run's last phase begins.

    Args:
        folder: folder of this node's beats.
        clock: clock that the watcher reads too.
    """

    def __init__(
        self, folder: Path, rule: HangsConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file, self._rule, self._clock = beat_file(folder, DRIVER), rule, clock
        self._taken: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._stepping = False
        self._phases = [self._new(BETWEEN)]  # outermost first
        self._beat = Beat(DRIVER, os.getpid(), BETWEEN, time.time(), clock(), begun=time.time())
        self._put()

    def start(self, run: RunOutline) -> None:
        """See Sink."""
        self._put(steps=run.config.run.steps)

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """See Sink."""
        self._put(steps=run.config.run.steps, step=step)

    def begin_step(self, step: int) -> None:
        """Starts a step, and thereby ends the previous step."""
        self._between()
        self._stepping = True
        self._phases = [self._new(BETWEEN)]
        self._put(step=step)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        """See Sink."""
        if (seconds := metrics.get("time/step_s")) is not None:
            self._steps.append(seconds)
        self._put(step_s=tuple(self._steps), tokens_per_s=metrics.get("perf/tokens_per_s"))

    def begin_phase(self, name: str) -> None:
        """See Sink."""
        self._between()
        self._phases.append(self._new(name))
        self._put(done=0, total=0)

    def end_phase(self, name: str) -> None:
        """See Sink."""
        now, inner = self._clock(), self._phases.pop()
        self._taken[inner.name].append(now - inner.entered)
        if len(self._phases) > 1:
            outer = self._phases[-1]
            outer.entered += now - inner.begun
            outer.moved += now - inner.begun
        else:
            self._phases = [self._new(BETWEEN)]
        self._put(done=0, total=0)

    def progress(self, done: int, total: int) -> None:
        """See Sink."""
        now = self._clock()
        if done == total or now - self._phases[-1].moved >= PROGRESS_S:
            self._phases[-1].moved = now
            self._put(done=done, total=total)

    def progress_here(self) -> None:
        """Records progress that other code of this process reports with `tell_progress`, such as a
        finished micro-batch."""
        now = self._clock()
        if now - self._phases[-1].moved >= PROGRESS_S:
            self._phases[-1].moved = now
            self._put()

    def last_phase(self, name: str) -> None:
        """Starts the last phase of the run. The last phase is the export or the closing of the run,
        and belongs to no step."""
        self._phases = [self._new(name)]
        self._put(done=0, total=0)

    def _between(self) -> None:
        """Records how long the driver has been outside all phases. The recorded time begins when
        the last phase of the step ended. If the step has had no phase yet, the recorded time begins
        when the step began. Does nothing while a phase is open. The time before the first step is
        not recorded, because the weights are loaded during that time."""
        if self._stepping and len(self._phases) == 1:
            self._taken[BETWEEN].append(self._clock() - self._phases[0].entered)

    def _new(self, name: str) -> _Phase:
        now = self._clock()
        return _Phase(name, time.time(), now, now, now, self._rule.limit_s(self._taken[name]))

    def _put(self, **known: object) -> None:
        now = self._phases[-1]
        at = {"phase": now.name, "since": now.since, "moved": now.moved, "limit_s": now.limit_s}
        self._beat = replace(self._beat, **at, **known)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):  # the watch must not end the run
            write_beat(self._file, self._beat)


class BlackBox:
    """A run's watcher. The watcher starts before the first worker starts, and ends after the last
    worker has ended. `close` may be called twice.

    Args:
        ports: ports on which the watcher may listen for agents on other nodes; None: any.
        supervised: whether a supervisor restarts the driver.

    Raises:
        UserError: the watcher cannot be started.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ports: Sequence[int] | None,
        *,
        supervised: bool = False,
    ) -> None:
        where = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        forget_left(where)
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=where))
        self._joined = config.runtime.ray_address is not None
        rule = config.faults.hangs
        settings = Settings(
            str(self._folder),
            str(run_dir.resolve()),
            os.getpid(),
            end_run=rule.end_run,
            supervised=supervised,
            urls=config.sglang.urls,
            token=secrets.token_hex(16) if self._joined else "",
            ports=list(ports or ()),
            tick_s=min(TICK_S, rule.floor_s / 4),
        )
        (self._folder / SETTINGS).write_text(json.dumps(dataclasses.asdict(settings)))
        self.beats = DriverBeats(self._folder, rule)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron_stare.hangs.watcher", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # beyond the reach of Ctrl-C
        )
        os.environ[FOLDER_VARIABLE] = str(self._folder)
        watch_progress(self.beats.progress_here)
        if self._joined:
            try:
                os.environ[WATCHER], os.environ[TOKEN] = self._port(), settings.token
            except BaseException:
                self.close()
                raise

    def _port(self) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                if port := (self._folder / LISTENING).read_text():
                    return port
            time.sleep(0.02)
        raise UserError(
            "the watcher of the run does not start",
            where="faults.hangs.enabled",
            fix="set faults.hangs.enabled=false to run without it",
        )

    def close(self) -> None:
        """Stops the watcher."""
        watch_progress(None)
        for name in CARRIED:
            os.environ.pop(name, None)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:  # it is writing a bundle
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def forget_left(where: Path) -> None:
    """Removes the folders of killed watchers. Watchers usually create their folders in /dev/shm, a
    file system in memory. A watcher that is killed does not remove its folder. Without
    `forget_left`, the folder would occupy memory until the machine reboots.

    If a folder's lock is free, the folder's watcher is gone. Unlike a check of the watcher's pid, a
    check of the lock also works for a watcher that ran in another PID namespace.
    """
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > OLD_S:
                shutil.rmtree(folder)


def carried(host: str) -> dict[str, str]:
    """Returns the environment variables that tell a worker where to write its beats. Returns {} if
    the run has no watcher.

    Args:
        host: the driver's host. The watcher's agents connect to this host.
    """
    found = {name: os.environ[name] for name in CARRIED if name in os.environ}
    if WATCHER in found:
        found[WATCHER] = f"{host}:{found[WATCHER]}"
    return found


def beats_here(role: str, node: str) -> CallBeats:
    """Returns the object that writes the beats of a worker. Environment variables of the worker
    show whether a watcher runs. If the run has joined an existing Ray cluster, `beats_here` also
    makes sure that an agent of the watcher runs on the worker's node.

    Args:
        node: Ray's id of the node.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return CallBeats(None, role)
    here = Path(folder)
    if WATCHER in os.environ:
        here = here.with_name(f"{here.name}-{node[:8]}")
        try:
            ensure(here, f"{os.uname().nodename}/{node[:8]}")
        except OSError:
            return CallBeats(None, role)
    # torch reads these when a rank creates NCCL process groups
    for name, value in node_facts.flight_environment(here).items():
        os.environ.setdefault(name, value)
    return CallBeats(here if here.is_dir() else None, role)


class Watched:
    """Starts a watcher. Reports the current phase of this process, and the progress of this phase,
    to the watcher. Does nothing if faults.hangs.enabled is false. `close` may be called twice.

    Args:
        folder: folder for heartbeat.json and bundles.
        step: number of training steps that produced the weights.
        ports: ports on which the watcher may listen for agents on other nodes; None: any.

    Raises:
        UserError: the watcher cannot be started.
    """

    def __init__(
        self, config: Config, folder: Path, step: int, ports: Sequence[int] | None
    ) -> None:
        self._box: BlackBox | None = None
        if config.faults.hangs.enabled:
            self._box = BlackBox(config, folder, ports)
            self._box.beats.begin_step(step)
        else:
            forget_heartbeat(folder)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that reports to the watcher that this process is in the phase `name`."""
        if self._box is None:
            yield
            return
        self._box.beats.begin_phase(name)
        try:
            yield
        finally:
            self._box.beats.end_phase(name)

    def progress(self, done: int, total: int) -> None:
        """Records the number of finished responses of the current phase."""
        if self._box is not None:
            self._box.beats.progress(done, total)

    def last_phase(self, name: str) -> None:
        """Begins the last phase. The last phase lasts until `close` is called."""
        if self._box is not None:
            self._box.beats.last_phase(name)

    def close(self) -> None:
        """Stops the watcher."""
        if self._box is not None:
            self._box.close()
