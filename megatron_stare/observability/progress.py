"""The live view of a run in a terminal or a log file: one line a step.

Comes from the metrics of the step; goes to stdout. Plain text, so that a log of a batch job can be read and grepped;
colour only where a person looks at a terminal.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TextIO

_DIM, _BOLD, _GREEN, _YELLOW, _RED = "2", "1", "32", "33", "31"
_OUTLIER = 3.0  # a step longer than this many medians is counted as that many


class RemainingTime:
    """Estimates the time left from a moving average of recent step times.

    The first step of a process warms up caches and compilers, so it is left out as soon as there is another. One long
    step among the recent (a stalled disk) is capped, so that it moves the estimate a little and not tenfold.

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


class StepPrinter:
    """Prints one aligned line a step, and notes and warnings between them.

    Args:
        total_steps: the step the run ends with.
        out: where to; default the stdout of the moment of the call.
        smoothing: steps that the estimate of the time left averages over.
    """

    def __init__(self, total_steps: int, out: TextIO | None = None, smoothing: int = 20) -> None:
        self._out = sys.stdout if out is None else out
        self._total = total_steps
        self._colour = self._out.isatty() and not os.environ.get("NO_COLOR")
        self._remaining = RemainingTime(smoothing)
        self._widths = {"step": len(str(total_steps)), "reward": 5, "entropy": 5, "length": 6, "rate": 6, "time": 5}
        self._shown: set[str] = set()  # columns seen so far: a value missing once leaves a dash, not a hole
        self._last_call = time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step. Metrics the method does not have leave no column.

        The time left counts training steps at their recent pace; evaluations and checkpoints come on top.
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

    def note(self, text: str) -> None:
        """Prints a remark between the steps."""
        self._write(self._paint(_DIM, text))

    def warn(self, text: str) -> None:
        """Prints something the person should look into."""
        self._write(self._paint(_YELLOW, f"warning: {text}"))

    def _column(
        self, name: str, metrics: Mapping[str, float], key: str, spec: str, label: str | None = None, unit: str = ""
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
        return column if target is None or not column else column + self._paint(_DIM, f" (target {target:.3f})")

    def _gate(self, metrics: Mapping[str, float]) -> str:
        if "stare/gate" not in metrics:
            return ""
        on = metrics["stare/gate"] >= 0.5
        return self._paint(_DIM, "gate") + " " + (self._paint(_GREEN, "on ") if on else self._paint(_DIM, "off"))

    def _left(self, step: int) -> str:
        seconds = self._remaining.left(max(0, self._total - step))
        return "" if seconds is None else self._paint(_DIM, "left") + " " + clock(seconds)

    def _pad(self, name: str, text: str) -> str:
        # Columns only ever grow: short runs stay compact, and a wide value does not make every later line jump back.
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
