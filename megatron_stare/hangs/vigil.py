"""When a run hangs: its driver's beats held against their limits. Pure: it is told the time."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_stare.run_dir.heartbeat import Beat

MOST = 20  # bundles of a run; one that is taken for hanging again and again has wrong limits
STARVED = 9.0  # limits more that a run is given while it waits for a CPU: longer, and somebody should know
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
    held_s: float = 0.0  # that the watcher was held up since the run last got on: the machine slept, or was too busy
    starved_s: float = 0.0  # that the run waited for a CPU since then

    def near(self, beat: Beat, now: float) -> bool:
        """Whether the run has been for half of its limit where it is: what it waits for begins to matter."""
        return beat.limit_s is not None and beat.moved == self._moved and 2 * self.without_s(beat, now) > beat.limit_s

    def hangs(self, beat: Beat, now: float, starved_s: float = 0.0) -> bool:
        """Whether the run hangs and this was not said yet of the phase that it is in.

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
