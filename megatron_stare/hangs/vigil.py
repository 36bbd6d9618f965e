"""Decides when a run hangs: the beats of its driver held against their limits.

Time that its processes were given no CPU, because other programs had it, does not count. Ray starts
its workers with a low priority (nice 15), so a few busy programs can make them a hundred times as
slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.hangs import proc_files
from megatron_stare.run_dir.heartbeat import DRIVER, Beat, beats_of

MOST = 20  # bundles of a run; one that is taken for hanging again and again has wrong limits
# further limits for a run that waits for a CPU; after that somebody should know
STARVED = 9.0
LATE = 2.0  # looks, after which the watcher itself was held up, and the run with it


@dataclass
class Vigil:
    """Over one run.

    Args:
        every_s: it is looked.
    """

    every_s: float
    _told: set[tuple[str, float]] = field(default_factory=set)
    _looked: float | None = None
    _moved: float = 0.0  # of the newest beat
    # seconds that the watcher was held up since the run last progressed: the machine slept or was
    # too busy
    held_s: float = 0.0
    starved_s: float = 0.0  # that the run waited for a CPU since then

    def near(self, beat: Beat, now: float) -> bool:
        """Says whether the run has been for half of its limit where it is: what it waits for begins
        to matter."""
        return (
            beat.limit_s is not None
            and beat.moved == self._moved
            and 2 * self.without_s(beat, now) > beat.limit_s
        )

    def hangs(self, beat: Beat, now: float, starved_s: float = 0.0) -> bool:
        """Says whether the run hangs and this was not said yet of the phase that it is in.

        Args:
            now: seconds of the clock of `beat.moved`.
            starved_s: that its processes waited for a CPU since the last call, all together.
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
        """For how long the run has not got on, though it could have, seconds."""
        return now - beat.moved - self.held_s - min(self.starved_s, STARVED * (beat.limit_s or 0.0))


class Starvation:
    """Looked at again and again."""

    def __init__(self) -> None:
        self._waited: dict[int, dict[int, float]] = {}  # by process, of its threads

    def since(self, pids: Iterable[int]) -> float:
        """Seconds since the last look that these processes waited for a CPU, each its thread that
        waited longest; 0 for one that was not looked at then. A thread that sleeps until something
        comes does not wait for one."""
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
        """The next look is a first one."""
        self._waited = {}


def of_the_run(folder: Path) -> set[int]:
    """The processes of this node that a phase may wait for: the driver, ranks and engines, and what
    these have started: servers and writers. Those too that are in no call: one may be asked and not
    know it for want of a CPU.

    Args:
        folder: of this node's beats.
    """
    beats = beats_of(folder)
    workers = [beat.pid for beat in beats if beat.role != DRIVER]
    return {beat.pid for beat in beats} | proc_files.below(workers, proc_files.everything())
