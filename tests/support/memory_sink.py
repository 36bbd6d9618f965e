"""A sink that writes down the memory of the driver and of what the driver started."""

from __future__ import annotations

from pathlib import Path

from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.process.memory import tree_pss_bytes

FILE = "own_tree_gb"


class OwnTree(Sink):
    """FILE in the run's folder: the Pss after the first step, in GB."""

    def __init__(self) -> None:
        self._file = Path()

    def start(self, run: RunOutline) -> None:
        self._file = run.dir / FILE

    def step(self, *given: object) -> None:
        if not self._file.exists():
            self._file.write_text(str((tree_pss_bytes() or 0) / 1e9))
