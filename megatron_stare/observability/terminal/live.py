"""Shows a run on a terminal as a panel that stays in place. `make_display` chooses between the
panel and plain lines.

`sinks/console.py` calls the display. On a separate thread, the library rich draws the panel a few
times a second from a snapshot. The driver's thread does not draw, and only stores new values in the
snapshot. Notes, warnings and alerts are also printed once above the panel, so that they remain
visible when the panel is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from megatron_stare.observability.sink import Alert
from megatron_stare.observability.terminal.live_panel import MAX_WIDTH, SERIES, View, build
from megatron_stare.observability.terminal.progress import RemainingTime, RunDisplay, StepPrinter

REFRESH_HZ = 4.0
_KEPT = 2 * MAX_WIDTH  # values of a series: two per character of the widest panel
_BETWEEN_STEPS = ("eval", "checkpoint")  # they follow their step's metrics but belong to that step


def make_display(total_steps: int, out: TextIO | None = None) -> RunDisplay:
    """Returns a live panel if the output `out` is a terminal that can show the panel, and otherwise
    a printer of plain lines.

    Args:
        total_steps: number of the run's last step.
        out: output; default stdout.
    """
    out = sys.stdout if out is None else out
    dumb = os.environ.get("TERM", "").lower() in ("dumb", "unknown")
    blocks = (getattr(out, "encoding", None) or "").lower().replace("-", "").startswith("utf")
    if out.isatty() and not dumb and blocks:
        return LiveDisplay(total_steps, Console(file=out, force_terminal=True, highlight=False))
    return StepPrinter(total_steps, out)


class LiveDisplay(RunDisplay):
    """Shows a live panel. The constructor opens the panel. The panel stays live until `close` is
    called or the Python interpreter exits.

    Args:
        total_steps: number of the run's last step.
        console: output.
        auto_refresh: if True, a thread redraws the panel. If False, the panel is redrawn only when
            a line is printed or the display is closed.
        now: monotonic clock, seconds.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console,
        auto_refresh: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._console, self._now = total_steps, console, now
        # the driver writes the following fields, the redrawing thread reads them
        self._lock = threading.Lock()
        self._run_dir = self._algorithm = self._closed = ""
        self._step, self._started = 0, now()
        self._series: dict[str, deque[float]] = {key: deque(maxlen=_KEPT) for key in SERIES}
        self._remaining = RemainingTime()
        self._phases: list[tuple[str, float]] = []  # open phases, outermost first
        self._responses: tuple[int, int] | None = None
        self._seconds: dict[str, float] = {}
        self._evaluated: dict[str, tuple[float, int]] = {}
        self._active: tuple[Alert, ...] = ()
        self._over: deque[Alert] = deque(maxlen=3)
        self._last_call = now()
        self._live = Live(
            console=console,
            get_renderable=self._panel,
            refresh_per_second=REFRESH_HZ,
            auto_refresh=auto_refresh,
            redirect_stdout=console.file is sys.stdout,
            redirect_stderr=sys.stderr.isatty(),  # stderr that goes to a file must continue to
        )
        atexit.register(self.close)
        self._live.start()

    def start(self, run_dir: str, algorithm: str) -> None:
        """Shows the method and the run directory in the panel's title."""
        with self._lock:
            self._run_dir, self._algorithm = run_dir, algorithm

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Adds the earlier steps of a resumed run to the charts."""
        with self._lock:
            for row in rows[-_KEPT:]:
                self._append(row)
            if rows:
                self._step = int(rows[-1]["step"])

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Shows the innermost phase and the time spent in the phase."""
        start = self._now()
        with self._lock:
            self._phases.append((name, start))
            self._responses = None
        try:
            yield
        finally:
            with self._lock:
                self._phases.pop()
                self._responses = None
                self._seconds[name] = self._now() - start

    def rollout_progress(self, done: int, total: int) -> None:
        """Shows the number of finished responses while the current phase lasts."""
        self._responses = (done, total)

    def evaluated(self, name: str, value: float, step: int) -> None:
        """Shows the newest result of an evaluation task in the run's panel."""
        with self._lock:
            self._evaluated[name] = value, step

    def note(self, text: str) -> None:
        """Prints a remark above the panel."""
        self._console.print(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        """Prints a warning above the panel."""
        self._console.print(Text(f"warning: {text}", style="yellow"))

    def close(self) -> None:
        """Draws the panel's final state and releases the terminal."""
        atexit.unregister(self.close)
        with self._lock:
            if not self._closed:
                self._closed = (
                    "finished" if self._step >= self._total else f"stopped after step {self._step}"
                )
        self._live.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a finished step to the panel's numbers and charts."""
        with self._lock:
            now = self._now()
            self._remaining.add(metrics.get("time/step_s", now - self._last_call))
            self._last_call, self._step = now, step
            self._append(metrics)
            measured = {
                k[5:-2]: v
                for k, v in metrics.items()
                if k.startswith("time/") and k != "time/step_s"
            }
            # Phases that this step lacked are dropped. If no phase times are logged, our own are
            # kept.
            self._seconds = measured or {
                k: v for k, v in self._seconds.items() if k not in _BETWEEN_STEPS
            }

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        """Lists the active alerts in the panel. Prints a line above the panel for every alert that
        began or ended."""
        with self._lock:
            self._active = tuple(active)
        super().alerts(changed, active)

    def _announce(self, alert: Alert) -> None:
        if alert.over:
            with self._lock:
                self._over.append(alert)
        super()._announce(alert)

    def _append(self, metrics: Mapping[str, float]) -> None:
        for key, values in self._series.items():
            values.append(metrics.get(key, math.nan))

    def _view(self) -> View:
        with self._lock:
            phase, since = self._phases[-1] if self._phases else ("", 0.0)
            now = self._now()
            return View(
                total=self._total,
                step=self._step,
                run_dir=self._run_dir,
                algorithm=self._algorithm,
                series={key: tuple(values) for key, values in self._series.items()},
                seconds=dict(self._seconds),
                phase=phase,
                phase_s=now - since,
                responses=self._responses,
                left_s=self._remaining.left(max(0, self._total - self._step)),
                run_s=now - self._started,
                active=self._active,
                over=tuple(self._over),
                evaluated=[(name, value, step) for name, (value, step) in self._evaluated.items()],
                closed=self._closed,
                shaded=self._console.color_system in ("256", "truecolor")
                and not self._console.no_color,
            )

    def _panel(self) -> RenderableType:
        # One row fewer than the terminal has: a panel of full height would scroll at every redraw.
        # Two columns fewer: the terminal echoes ^C at the end of the last line; if that wrapped,
        # the next panel would start a line too low.
        return build(self._view(), self._console.width - 2, self._console.height - 1)
