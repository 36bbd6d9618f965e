"""`--stop-after`: how long a run may take, and whether one more step, and the save after it, still
fit."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

from megatron_stare.errors import ConfigError

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_SECONDS = (86_400, 3_600, 60, 1)
_NEWEST = 10  # steps whose longest is what the next is expected to take
_ROOM = 1.1  # times what is expected: steps grow with their responses
CLOSING_S = 10.0  # for workers, servers and files


def seconds_of(text: str) -> float:
    """Seconds of a duration such as 3h50m, 90m, 2h, 1d12h, 45s or 5400.

    Raises:
        ConfigError: it is none of these, or no time at all.
    """
    found = _DURATION.fullmatch(text)
    total = (
        sum(int(n) * unit for n, unit in zip(found.groups(), _SECONDS, strict=True) if n)
        if found
        else 0
    )
    if not total:
        raise ConfigError(
            f"{text!r} is not a duration",
            where="--stop-after",
            fix="write it as 3h50m, 90m, 2h or 5400 (seconds)",
        )
    return float(total)


class TimeLimit:
    """Seconds from `begun` on. Steps are expected to take what the longest of the newest took, a
    save what the longest took so far; before either is known, nothing is said against the first.

    Args:
        limit_s: None: there is no limit.
        begun: by `clock`.
    """

    def __init__(
        self, limit_s: float | None, begun: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s, self._begun, self._clock = limit_s, begun, clock
        self._steps: deque[float] = deque(maxlen=_NEWEST)
        self._step_begun: float | None = None

    def begin_steps(self) -> None:
        """A session comes to its steps. What was between them and the last step of a session before
        is no step: that step was lost, and the run was opened again."""
        self._step_begun = None

    def begin_step(self) -> None:
        """The step before, with all that came after it, is over."""
        now = self._clock()
        if self._step_begun is not None:
            self._steps.append(now - self._step_begun)
        self._step_begun = now

    def passed_before_another(self, save_s: float) -> bool:
        """Tells whether one more step, and the save after it, would pass the limit; to be asked
        after `begin_step`.

        Args:
            save_s: the longest that a save took so far.
        """
        if self._limit_s is None:
            return False
        expected = _ROOM * (max(self._steps, default=0.0) + save_s) + CLOSING_S
        return self._clock() - self._begun + expected > self._limit_s
