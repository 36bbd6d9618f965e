"""The driver's beats: what a run reports to its sinks anyway, put down for the watcher with the limit of each phase."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_stare.config.fault_sections import HangsConfig
from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.heartbeat import BETWEEN, DRIVER, Beat, beat_file, write_beat

KEPT = 20  # durations of each phase, and steps
PROGRESS_S = 0.2  # progress is put down this often at most: responses may end by the thousand


@dataclass
class _Phase:
    """One that is open. Times are seconds of `clock`, moved on by what phases inside it took."""

    name: str
    since: float  # seconds since 1970
    begun: float
    entered: float
    moved: float
    limit_s: float


class DriverBeats(Sink):
    """Told by the monitor like any sink, and by the session where a step or the run's end begins.

    Args:
        folder: of this node's beats.
        clock: that the watcher reads too.
    """

    def __init__(self, folder: Path, rule: HangsConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._rule, self._clock = beat_file(folder, DRIVER), rule, clock
        self._taken: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._stepping = False
        self._phases = [self._new(BETWEEN)]  # the outermost first
        self._beat = Beat(DRIVER, os.getpid(), BETWEEN, time.time(), clock(), begun=time.time())
        self._put()

    def start(self, run: RunOutline) -> None:
        """See Sink."""
        self._put(steps=run.config.run.steps)

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        """See Sink."""
        self._put(steps=run.config.run.steps, step=step)

    def begin_step(self, step: int) -> None:
        """A step begins, which the run is at until the next."""
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

    def last_phase(self, name: str) -> None:
        """The run's end begins, which is part of no step: its export, or that everything is closed."""
        self._phases = [self._new(name)]
        self._put(done=0, total=0)

    def _between(self) -> None:
        """What the time between two phases of steps comes to; weights are loaded before the first step."""
        if self._stepping and len(self._phases) == 1:
            self._taken[BETWEEN].append(self._clock() - self._phases[0].entered)

    def _new(self, name: str) -> _Phase:
        now = self._clock()
        return _Phase(name, time.time(), now, now, now, self._rule.limit_s(self._taken[name]))

    def _put(self, **known: object) -> None:
        now = self._phases[-1]
        at = {"phase": now.name, "since": now.since, "moved": now.moved, "limit_s": now.limit_s}
        self._beat = replace(self._beat, **at, **known)  # type: ignore[arg-type]
        with contextlib.suppress(OSError):  # what watches a run must not end it
            write_beat(self._file, self._beat)
