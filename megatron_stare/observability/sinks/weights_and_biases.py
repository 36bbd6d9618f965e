"""Reports steps and evaluations as a run of W&B, online or offline.

W&B buffers up to one block of 32 KB before it writes to its file. If the driver is killed, the
buffered data is lost. A resumed offline run therefore continues after the last row in W&B's files,
not after the last step that was sent. W&B's files are logs in LevelDB's format
(github.com/google/leveldb, doc/log_format.md). A header of 7 bytes precedes the log. The log's
records are protocol buffers, which the wandb package defines.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import Field

from megatron_stare.observability.sink import RunOutline
from megatron_stare.observability.sinks.delivery import Delivered
from megatron_stare.observability.sinks.service import Service, under

_TRAINED = "time/step_s"  # in the rows of steps, not of evaluations
_BLOCK, _HEADER = 32768, 7
_WHOLE, _LAST = 1, 4


class WeightsAndBiases(Service):
    """Logs one row per step and one row per evaluation. In W&B's charts, the horizontal axis is
    `step`.

    In W&B's online mode, a resumed run continues the same W&B run. W&B cannot continue an offline
    run, so each offline start is a separate W&B run. All offline W&B runs of one training run
    belong to one W&B group. Each training step is logged in only one of the W&B runs of a group.

    Args:
        project: W&B project.
        entity: W&B user or team; None: the entity of the login.
        mode: 'offline' writes files into the run directory for a later `wandb sync`. None:
            WANDB_MODE if it is set, else 'online'.
    """

    name, package = "wandb", "wandb"

    def __init__(
        self,
        *,
        project: Annotated[str, Field(min_length=1)] = "megatron_stare",
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        super().__init__()
        self._project, self._entity, self._mode = project, entity, mode

    def look(self, run: RunOutline, delivered: Delivered) -> None:
        rows = offline_rows(run.dir, delivered.id)
        if rows is None:  # it was online
            return
        delivered.step = min(
            delivered.step, max((row["step"] for row in rows if _TRAINED in row), default=0)
        )
        delivered.evaluated = [
            [step, task]
            for step, task in delivered.evaluated
            if any(
                row["step"] == step and any(key.startswith(under(str(task))) for key in row)
                for row in rows
            )
        ]

    def open(self, run: RunOutline, delivered: Delivered) -> None:
        import wandb  # takes seconds

        settings = wandb.Settings(console="off", silent=True)  # stdout belongs to the console sink
        mode = self._mode or wandb.setup(settings).settings.mode
        offline = mode == "offline"
        self._run: Any = wandb.init(
            project=self._project,
            entity=self._entity,
            name=run.config.run.name,
            id=f"{delivered.id}-{delivered.starts}" if offline else delivered.id,
            group=delivered.id if offline else None,
            resume=None if offline else "allow",
            mode=mode,
            dir=str(run.dir),
            config={**run.config.model_dump(mode="json"), "redone": delivered.redone},
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def send(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures}, commit=True)

    def end(self, finished: bool) -> None:
        import wandb

        try:
            self._run.finish(exit_code=0 if finished else 1)
        except Exception:
            with contextlib.suppress(Exception):
                wandb.teardown()  # else it fails again, with a traceback, at exit
            raise

    def abandon(self) -> None:
        import wandb

        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.name().startswith("wandb-core"):
                    child.kill()
        with contextlib.suppress(Exception):
            wandb.teardown()  # else the next start in this process asks the killed one, and fails


def offline_rows(run_dir: Path, id: str = "*") -> list[dict[str, Any]] | None:
    """Reads all rows that an offline run has logged, oldest first, including the rows from before
    the run resumed. Returns None if the run has no offline files of W&B.

    Args:
        id: the run's `Delivered.id`. In a copied run directory, files of the original run have
            another id. "*" reads all files.
    """
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    if not (files := sorted(run_dir.glob(f"wandb/offline-run-*/run-{id}-*.wandb"))):
        return None
    for file in files:
        for packed in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(packed)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        item.key or item.nested_key[0]: json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """Yields the complete records of a W&B file. Drops a record that is cut off at the end of the
    file."""
    at, part = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # no room for a header: the rest of the block is empty
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if kind == 0 or at + _HEADER + size > len(data):
            return
        part, at = part + data[at + _HEADER : at + _HEADER + size], at + _HEADER + size
        if kind in (_WHOLE, _LAST):
            yield part
            part = b""
