"""Defines the interface of a run's display, and a plain version that prints one line per step.

`sinks/console.py` calls the display, and the display writes to stdout. The plain version prints
plain text, so that logs of batch jobs can be read and searched. Colour appears only on a terminal.
The panel for terminals is in `live.py`. `make_display` in `live.py` chooses between the panel and
plain lines.
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
from typing import Self, TextIO

from megatron_stare.observability.sink import Alert

_DIM, _BOLD, _GREEN, _YELLOW, _RED = "2", "1", "32", "33", "31"
_OUTLIER = 3.0  # a longer step counts as this many medians


class RemainingTime:
    """Estimates the remaining time from a moving average of recent step times.

    The first step of a process warms up caches and compilers, so the time of this step is dropped
    as soon as a second step is done. The time of an unusually long step is capped, so that a single
    delay, such as a stalled disk, changes the estimate only a little.

    Args:
        window: number of steps in the average.
    """

    def __init__(self, window: int = 20) -> None:
        self._recent: deque[float] = deque(maxlen=max(1, window))
        self._seen = 0

    def add(self, seconds: float) -> None:
        """Adds the duration of a step to the moving average."""
        if not math.isfinite(seconds) or seconds < 0:
            return
        if self._seen == 1:
            self._recent.clear()
        self._recent.append(seconds)
        self._seen += 1

    def left(self, steps: int) -> float | None:
        """Estimates how many seconds the remaining steps will take. `steps` is the number of
        remaining steps. Returns None if no step is finished yet."""
        if not self._recent:
            return None
        cap = _OUTLIER * statistics.median(self._recent)
        return steps * statistics.fmean(min(seconds, cap) for seconds in self._recent)


class RunDisplay(ABC):
    """Displays a run's progress to the user. The display is a context manager; `close` restores the
    terminal."""

    def start(self, run_dir: str, algorithm: str) -> None:
        """Shows the run directory."""
        self.note(f"run directory {run_dir}")

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:  # noqa: B027 - a line printed then is not shown again
        """Receives the metrics of a resumed run's earlier steps, as `run_files.read_metrics`
        returns them. Shows nothing."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Marks the time inside this context as a phase of the step: rollout, reward, log_probs,
        update, sync, eval or checkpoint."""
        yield

    def rollout_progress(self, done: int, total: int) -> None:  # noqa: B027 - one line a step has no place for it
        """Receives the number of finished responses (`done`) and the number of responses that the
        current phase needs in total (`total`)."""

    def evaluated(self, name: str, value: float, step: int) -> None:  # noqa: B027 - a line is printed by `note`
        """Receives the newest result of an evaluation task: the result's name and value, and the
        step of the evaluated weights."""

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        """Shows the alerts that began or ended in the step that was shown last.

        Args:
            active: all active alerts with their newest values.
        """
        for alert in changed:
            self._announce(alert)

    def close(self) -> None:  # noqa: B027 - nothing to restore where lines were printed
        """Ends the display. Closing twice is allowed."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Shows a remark to the user."""

    @abstractmethod
    def warn(self, text: str) -> None:
        """Shows a warning."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step."""

    def _announce(self, alert: Alert) -> None:
        (self.note if alert.over else self.warn)(alert.announce())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StepPrinter(RunDisplay):
    """Prints one aligned line per step. Notes, warnings and alerts are printed between the lines of
    the steps.

    Args:
        total_steps: number of the run's last step.
        out: output; default stdout at the time of the call.
    """

    def __init__(self, total_steps: int, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._total = total_steps
        self._colour = (
            self._out.isatty()
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") != "dumb"
        )
        self._remaining = RemainingTime()
        self._widths = {
            "step": len(str(total_steps)),
            "reward": 5,
            "loss": 6,
            "held-out": 6,
            "tokens": 5,
            "lr": 8,
            "grad": 5,
            "entropy": 5,
            "length": 6,
            "rate": 6,
            "time": 5,
        }
        # columns seen so far: a value that is missing once leaves a dash instead of a gap
        self._shown: set[str] = set()
        self._last_call = time.monotonic()

    def note(self, text: str) -> None:
        """Prints a remark for the user on a line of its own."""
        self._write(self._paint(_DIM, text))

    def warn(self, text: str) -> None:
        """Prints a warning."""
        self._write(self._paint(_YELLOW, f"warning: {text}"))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step. The line has no column for a metric that the method
        does not report.

        The remaining time is estimated from recent training steps. The estimate does not include
        evaluations and checkpoints, which take additional time.
        """
        now = time.monotonic()
        self._remaining.add(metrics.get("time/step_s", now - self._last_call))
        self._last_call = now
        columns = [
            self._bold(f"step {self._pad('step', str(step))}/{self._total}"),
            self._column("reward", metrics, "reward/mean", ".3f"),
            *self._supervised(metrics),
            self._entropy(metrics),
            self._gate(metrics),
            self._column("length", metrics, "response/length_mean", ".1f"),
            self._column("rate", metrics, "perf/tokens_per_s", ",.0f", label="", unit=" tok/s"),
            self._column("time", metrics, "time/step_s", ".2f", label="", unit=" s/step"),
            self._left(step),
        ]
        self._write("  ".join(column for column in columns if column))

    def _supervised(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the columns that only a supervised fine-tuning run shows: loss, held-out loss,
        tokens, learning rate and gradient norm. A run that has logged a reward is not a supervised
        fine-tuning run. For such a run, the function returns an empty list."""
        if "reward" in self._shown:
            return []
        return [
            self._column("loss", metrics, "loss/policy", ".4f"),
            self._column("held-out", metrics, "heldout/loss", ".4f"),
            self._column("tokens", metrics, "loss/tokens", ",.0f"),
            self._column("lr", metrics, "optimizer/lr", ".2e"),
            self._column("grad", metrics, "optimizer/grad_norm", ".3f"),
        ]

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
        # Columns only grow: short runs stay compact, and after a wide value later lines stay
        # aligned.
        self._widths[name] = max(self._widths[name], len(text))
        return text.rjust(self._widths[name])

    def _bold(self, text: str) -> str:
        return self._paint(_BOLD, text)

    def _paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self._colour and text else text

    def _write(self, line: str) -> None:
        print(line.rstrip(), file=self._out, flush=True)


def clock(seconds: float) -> str:
    """Formats a duration as 5:01, 2:05:01 or 1d 02:05:01."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"
