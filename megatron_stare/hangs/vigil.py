"""Decides whether a run hangs. A run hangs if the run makes no progress for longer than the time
limit of its current phase. The driver's heartbeats report the current phase, its time limit and the
time of the last progress.

While other programs use the CPUs, the run's processes may wait for a CPU. Time in which the run's
processes wait for a CPU does not count towards a phase's limit. Ray starts workers with low
priority (nice 15), so a few busy programs can slow the workers down a hundredfold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.hangs import proc_files
from megatron_stare.run_dir.heartbeat import DRIVER, Beat, beats_of

# bundles of one start of a run, and bundles with NCCL's dumps of all starts; a run that seems to
# hang more often has wrong limits
MOST = 20
# further limits granted to a run that waits for a CPU; then it is reported
STARVED = 9.0
LATE = 2.0  # ticks by which a look may be late before the machine counts as held up


@dataclass
class Vigil:
    """Watches the progress of one run.

    Args:
        every_s: seconds between two checks of the driver's beat.
    """

    every_s: float
    _told: set[tuple[str, float]] = field(default_factory=set)
    _looked: float | None = None
    _moved: float = 0.0  # of the newest beat
    # seconds since the last progress in which the watcher itself was held up: the machine slept or
    # was too busy
    held_s: float = 0.0
    starved_s: float = 0.0  # seconds since then that the run waited for a CPU

    def near(self, beat: Beat, now: float) -> bool:
        """Returns True if the run has made no progress for more than half of the phase's time
        limit. While `near` returns True, the caller must measure how long the run's processes wait
        for a CPU."""
        return (
            beat.limit_s is not None
            and beat.moved == self._moved
            and 2 * self.without_s(beat, now) > beat.limit_s
        )

    def hangs(self, beat: Beat, now: float, starved_s: float = 0.0) -> bool:
        """Returns True if the run hangs. Reports at most one hang for each phase. The constant MOST
        limits the total number of reported hangs.

        Args:
            now: current time in seconds, on the same clock as `beat.moved`.
            starved_s: total seconds that the run's processes waited for a CPU since the last call.
        """
        since = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if beat.moved != self._moved:
            self._moved, self.held_s, self.starved_s = beat.moved, 0.0, 0.0
        elif since - self.every_s > LATE * self.every_s:
            self.held_s += since - self.every_s
        else:
            self.starved_s += min(starved_s, since)
        key = beat.phase, beat.since
        if beat.limit_s is None or self.without_s(beat, now) <= beat.limit_s or key in self._told:
            return False
        self._told.add(key)
        return len(self._told) <= MOST

    def without_s(self, beat: Beat, now: float) -> float:
        """Returns the seconds without progress. Does not count the seconds in which the whole
        machine stood still, or the seconds in which the run's processes waited for a CPU. Waiting
        for a CPU reduces the result by at most `STARVED` times the phase's time limit. A run that
        makes no progress for long enough is therefore reported as a hang, even if the run waits for
        a CPU all the time."""
        return now - beat.moved - self.held_s - min(self.starved_s, STARVED * (beat.limit_s or 0.0))


class Starvation:
    """Measures how long processes wait for a CPU between two calls of `since`."""

    def __init__(self) -> None:
        self._waited: dict[int, dict[int, float]] = {}  # by process, then thread

    def since(self, pids: Iterable[int]) -> float:
        """Returns the seconds that the processes `pids` waited for a CPU since the last call.

        The result is a sum over the processes. Each process contributes the waiting time of the
        thread that waited longest. A new process contributes 0. A thread that sleeps does not wait
        for a CPU.
        """
        before, self._waited = self._waited, {pid: proc_files.waited_for_cpu(pid) for pid in pids}
        total = 0.0
        for pid, threads in self._waited.items():
            known = before.get(pid, {})
            total += max(
                (waited - known[thread] for thread, waited in threads.items() if thread in known),
                default=0.0,
            )
        return total

    def forget(self) -> None:
        """Discards earlier measurements. The next call of `since` therefore returns 0, as the first
        call does."""
        self._waited = {}


def of_the_run(folder: Path) -> set[int]:
    """Returns the pids of all processes of this node that can delay a phase. These processes are
    the driver, the workers, and all descendants of the workers. For example, ranks and engines are
    workers, and a server that an engine has started is a descendant.

    The result includes idle workers. An idle worker may already have received a call, but cannot
    handle the call until it gets a CPU.

    Args:
        folder: folder of this node's beats.
    """
    beats = beats_of(folder)
    workers = [beat.pid for beat in beats if beat.role != DRIVER]
    return {beat.pid for beat in beats} | proc_files.below(workers, proc_files.everything())
