"""Shows how far a conversion is: a bar on a terminal, elsewhere a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich import progress as rich

_LINE_EVERY_S = 5.0


class Progress:
    """Counts bytes. A context manager; the last line says how much was done and how fast.

    Args:
        what: is being done, like 'convert'.
        total: bytes.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._started = self._last_line = time.monotonic()
        self._bar: rich.Progress | None = None
        if sys.stderr.isatty():
            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
            )
            self._bar = rich.Progress(*columns, console=rich.Console(stderr=True), transient=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            print(self._line(), file=sys.stderr)

    def advance(self, nbytes: int) -> None:
        """Takes note of `nbytes` more."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif (now := time.monotonic()) - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-3)
        share = 100 * self._done // max(self._total, 1)
        unit, size = ("GB", 1e9) if self._total >= 1e9 else ("MB", 1e6)
        done, total = self._done / size, self._total / size
        return f"{self._what}: {done:.2f} of {total:.2f} {unit}, {share} %, {self._done / seconds / 1e6:.0f} MB/s"
