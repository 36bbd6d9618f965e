"""The watcher beside a process that is no training run, and has no monitor to tell its phases to: `eval`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_stare.config.schema import Config
from megatron_stare.hangs.driver_side import BlackBox


class Watched:
    """The phases of this process, and what is done in them; told to nobody where faults.hangs.enabled is false. Closing
    twice is allowed.

    Args:
        folder: for heartbeat.json and bundles.
        step: training steps behind the weights.
        ports: that it may listen on for its agents on other nodes; None: any.

    Raises:
        UserError: the watcher cannot be started.
    """

    def __init__(self, config: Config, folder: Path, step: int, ports: Sequence[int] | None) -> None:
        self._box: BlackBox | None = None
        if config.faults.hangs.enabled:
            self._box = BlackBox(config, folder, ports)
            self._box.beats.begin_step(step)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While open, the process is at this."""
        if self._box is None:
            yield
            return
        self._box.beats.begin_phase(name)
        try:
            yield
        finally:
            self._box.beats.end_phase(name)

    def progress(self, done: int, total: int) -> None:
        """So many responses of the phase are done."""
        if self._box is not None:
            self._box.beats.progress(done, total)

    def last_phase(self, name: str) -> None:
        """What begins now goes on until `close`."""
        if self._box is not None:
            self._box.beats.last_phase(name)

    def close(self) -> None:
        """Ends the watcher."""
        if self._box is not None:
            self._box.close()
