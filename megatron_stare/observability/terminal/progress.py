"""A run as the driver shows it to people: the interface, and the plain kind of it, one line a step.

Comes from `sinks/console.py`; goes to stdout. Plain text, so that a log of a batch job can be read
and grepped; colour only where a person looks at a terminal. The panel for terminals is in
`live.py`, whose `make_display` chooses.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO, TypeVar

from megatron_stare.observability.sink import Alert

_DIM, _BOLD, _GREEN, _YELLOW, _RED = "2", "1", "32", "33", "31"
Display = TypeVar("Display", bound="RunDisplay")  # typing.Self came with Python 3.11
_OUTLIER = 3.0  # a step longer than this many medians is counted as that many


class RemainingTime:
    """Estimates the time left from a moving average of recent step times.

    The first step of a process warms up caches and compilers, so it is left out as soon as there is
    another. One long step among the recent (a stalled disk) is capped, so that it moves the
    estimate a little and not tenfold.

    Args:
        window: steps averaged over.
    """

    def __init__(self, window: int) -> None:
        self._recent: deque[float] = deque(maxlen=max(1, window))
        self._seen = 0

    def add(self, seconds: float) -> None:
        """Takes note of one step's duration."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        if self._seen == 1:
            self._recent.clear()
        self._recent.append(seconds)
        self._seen += 1

    def left(self, steps: int) -> float | None:
        """Seconds that `steps` more steps will take; None before the first one is done."""
        if not self._recent:
            return None
        cap = _OUTLIER * statistics.median(self._recent)
        return steps * statistics.fmean(min(seconds, cap) for seconds in self._recent)


class RunDisplay(ABC):
    """Display of a run for a person. A context manager; `close` leaves the terminal as it was
    found."""

    def start(self, run_dir: str, algorithm: str) -> None:
        """Says which run this is."""
        self.note(f"run directory {run_dir}")

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:  # noqa: B027 - a line printed then is not shown again
        """Takes the steps that a resumed run has behind it, as `metrics.read_metrics` returns them.
        Shows nothing."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time spent inside is this phase's: rollout, reward, log_probs, update, sync, eval,
        checkpoint."""
        yield

    def rollout_progress(self, done: int, total: int) -> None:  # noqa: B027 - one line a step has no place for it
        """Responses finished, of those wanted in this phase."""

    def evaluated(self, name: str, value: float, step: int) -> None:  # noqa: B027 - a line is printed by `note`
        """The newest result on a task: what it is called, its value, and the step of the
        weights."""

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        """Shows the alerts that began or are over with the step that was shown last.

        Args:
            active: all that hold, with their newest figures.
        """
        for alert in changed:
            self._announce(alert)

    def close(self) -> None:  # noqa: B027 - nothing to restore where lines were printed
        """Ends the display. Closing twice is allowed."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Shows a remark between the steps."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Shows something the person should look into."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the figures of a finished step."""

    def _announce(self, alert: Alert) -> None:
        (self.note if alert.over else self.warn)(alert.announce())

    def __enter__(self: Display) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StepPrinter(RunDisplay):
    """Prints one aligned line a step, and notes, warnings and alerts between them.

    Args:
        total_steps: the step the run ends with.
        out: where to; default the stdout of the moment of the call.
        smoothing: steps that the estimate of the time left averages over.
    """

    def __init__(self, total_steps: int, out: TextIO | None = None, smoothing: int = 20) -> None:
        self._out = sys.stdout if out is None else out
        self._total = total_steps
        self._colour = (
            self._out.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        self._remaining = RemainingTime(smoothing)
        self._widths = {
            "step": len(str(total_steps)),
            "reward": 5,
            "entropy": 5,
            "length": 6,
            "rate": 6,
            "time": 5,
        }
        # columns seen so far: a value missing once leaves a dash, not a hole
        self._shown: set[str] = set()
        self._last_call = time.monotonic()

    def note(self, text: str) -> None:
        """Prints a remark between the steps."""
        self._write(self._paint(_DIM, text))

    def warn(self, text: str) -> None:
        """Prints something the person should look into."""
        self._write(self._paint(_YELLOW, f"warning: {text}"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step. Metrics the method does not have leave no column.

        The time left counts training steps at their recent pace; evaluations and checkpoints come
        on top.
        """
        now = time.monotonic()
        self._remaining.add(metrics.get("time/step_s", now - self._last_call))
        self._last_call = now
        columns = [
            self._bold(f"step {self._pad('step', str(step))}/{self._total}"),
            self._column("reward", metrics, "reward/mean", ".3f"),
            self._entropy(metrics),
            self._gate(metrics),
            self._column("length", metrics, "response/length_mean", ".1f"),
            self._column("rate", metrics, "perf/tokens_per_s", ",.0f", label="", unit=" tok/s"),
            self._column("time", metrics, "time/step_s", ".2f", label="", unit=" s/step"),
            self._left(step),
        ]
        self._write("  ".join(column for column in columns if column))

    def _column(
        self,
        name: str,
        metrics: Mapping[str, float],
        key: str,
        spec: str,
        label: str | None = None,
        unit: str = "",
    ) -> str:
        if key not in metrics and name not in self._shown:
            return ""
        self._shown.add(name)
        value = metrics.get(key)
        text = self._pad(name, "-" if value is None else format(value, spec))
        if value is not None and not math.isfinite(value):
            text = self._paint(_RED, text)
        label = name if label is None else label
        return (self._paint(_DIM, label) + " " if label else "") + text + self._paint(_DIM, unit)

    def _entropy(self, metrics: Mapping[str, float]) -> str:
        column = self._column("entropy", metrics, "entropy/mean", ".3f")
        target = metrics.get("entropy/target")
        return (
            column
            if target is None or not column
            else column + self._paint(_DIM, f" (target {target:.3f})")
        )

    def _gate(self, metrics: Mapping[str, float]) -> str:
        if "stare/gate" not in metrics:
            return ""
        on = metrics["stare/gate"] >= 0.5
        return (
            self._paint(_DIM, "gate")
            + " "
            + (self._paint(_GREEN, "on ") if on else self._paint(_DIM, "off"))
        )

    def _left(self, step: int) -> str:
        seconds = self._remaining.left(max(0, self._total - step))
        return "" if seconds is None else self._paint(_DIM, "left") + " " + clock(seconds)

    def _pad(self, name: str, text: str) -> str:
        # Columns only ever grow: short runs stay compact, and a wide value does not make every
        # later line jump back.
        self._widths[name] = max(self._widths[name], len(text))
        return text.rjust(self._widths[name])

    def _bold(self, text: str) -> str:
        return self._paint(_BOLD, text)

    def _paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour and text else text

    def _write(self, line: str) -> None:
        print(line.rstrip(), file=self._out, flush=True)


def clock(seconds: float) -> str:
    """A duration as 5:01, 2:05:01 or 1d 02:05:01."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
