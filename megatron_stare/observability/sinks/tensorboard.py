"""Writes metrics for TensorBoard into tensorboard/ in the run directory."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.run_files import TENSORBOARD_DIR, evaluation_figures

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SECOND = re.compile(r"tfevents\.(\d+)\.")


class TensorBoard(Sink):
    """Writes every metric of every step and evaluation as a scalar. After an error, the next step
    or evaluation begins a new file."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._folder: Path | None = None

    def start(self, run: RunOutline) -> None:
        self._open(run.dir / TENSORBOARD_DIR, None)

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        _await_later_name(run.dir / TENSORBOARD_DIR)
        # TensorBoard ignores this and later steps in older files
        self._open(run.dir / TENSORBOARD_DIR, step + 1)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        self._scalars(step, metrics)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        task = f"{record['task']}/" if "task" in record else ""
        results = {
            f"eval/{task}{name}": value for name, value in evaluation_figures(record).items()
        }
        self._scalars(int(record["step"]), results)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer:
            writer.close()

    def _open(self, folder: Path, purge_step: int | None) -> None:
        # imported here, because it takes seconds and checks of a run do not need it
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        assert self._folder
        if self._writer is None:
            _await_later_name(self._folder)
            self._open(self._folder, None)
        assert self._writer
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            # the thread that writes ends with its first error, and every later call raises it again
            writer, self._writer = self._writer, None
            with contextlib.suppress(Exception):
                writer.close()
            raise


def _await_later_name(folder: Path) -> None:
    """Waits for at most one second, so that the name of the next new file sorts after the names of
    all files in `folder`.

    TensorBoard reads files in the order of their names, which contain the time in seconds. Without
    the wait, a run that is resumed immediately might create its new file in the same second as its
    earlier file, and TensorBoard might read the new file first.
    """
    seconds = [int(found[1]) for path in folder.glob("*") if (found := _SECOND.search(path.name))]
    wait_s = max(seconds, default=0) + 1 - time.time()
    time.sleep(min(max(wait_s, 0.0), 1.0))  # longer waits do not help if clocks differ by more
