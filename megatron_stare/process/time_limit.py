"""Implements `--stop-after`. Checks whether a run's time limit leaves enough time for one more step
and the save after this step."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

from megatron_stare.errors import ConfigError

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_SECONDS = (86_400, 3_600, 60, 1)
_NEWEST = 10  # steps; the next is expected to take as long as the longest of these
_ROOM = 1.1  # factor on the expected time: steps grow with their responses
CLOSING_S = 10.0  # for workers, servers and files


def seconds_of(text: str) -> float:
    """Parses a duration such as 3h50m, 90m, 2h, 1d12h, 45s or 5400 into seconds.

    Raises:
        ConfigError: the text is no duration, or is zero.
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
    """Time limit counted from `begun`. The expected step time is the time of the longest recent
    step. The expected save time is the time of the longest save so far. The method
    `passed_before_another` adds the expected step time and the expected save time, multiplies the
    sum by the factor `_ROOM`, and then adds `CLOSING_S` seconds. Until the first step ends, the
    expected step time is zero. Until the first save ends, the expected save time is zero.

    Args:
        limit_s: time limit in seconds; None: no limit.
        begun: time on `clock` at which the limit begins.
    """

    def __init__(
        self, limit_s: float | None, begun: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s, self._begun, self._clock = limit_s, begun, clock
        self._steps: deque[float] = deque(maxlen=_NEWEST)
        self._step_begun: float | None = None

    def begin_steps(self) -> None:
        """Starts a session's steps. A new session begins whenever the run is reopened after a
        rollback, or after a worker or an engine was lost. The time between the last step of one
        session and the first step of the next session does not count as a step time."""
        self._step_begun = None

    def begin_step(self) -> None:
        """Begins the next step, and records the duration of the previous step. The duration of a
        step is the time between two consecutive calls of `begin_step`."""
        now = self._clock()
        if self._step_begun is not None:
            self._steps.append(now - self._step_begun)
        self._step_begun = now

    def passed_before_another(self, save_s: float) -> bool:
        """Returns True if one more step and the save after this step would take longer than the
        time limit allows. Call this method after `begin_step`.

        Args:
            save_s: longest save so far, seconds.
        """
        if self._limit_s is None:
            return False
        expected = _ROOM * (max(self._steps, default=0.0) + save_s) + CLOSING_S
        return self._clock() - self._begun + expected > self._limit_s
