"""Engines without a trainer, for `megatron-stare eval`. The engines get their weights from a
Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_stare.config.schema import Config
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.signs_of_life import unsaid
from megatron_stare.process.workers import Handle
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.weights.files.check import check_folder
from megatron_stare.weights.files.hf_folder import HfFolder
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot
from megatron_stare.weights.sync.target import Sender, SyncTarget, WeightStream


class EnginesAlone(Protocol):
    """Interface of InlineEngines and RayEngines."""

    engines: EnginePool

    def notes(self) -> list[str]:
        """Returns the placement of the engines as lines of text. The list is empty if no placement
        was planned."""
        ...

    def share(self, value: Any) -> Handle:
        """Stores one copy of a value for all engines, and returns a handle to this copy."""
        ...

    def close(self) -> None: ...


def make_engines(config: Config, tell: Callable[[str], None] = unsaid) -> EnginesAlone:
    """Starts the engines in this process or in Ray, depending on `runtime.runner`. Imports Ray only
    if the engines start in Ray.

    Args:
        tell: a function that is called with a line of text before each start that takes seconds.

    Raises:
        UserError: an engine does not start or cannot be placed.
    """
    if config.runtime.runner == "inline":
        from megatron_stare.cluster.inline import InlineEngines

        return InlineEngines(config, tell)
    from megatron_stare.cluster.ray_runner import RayEngines

    return RayEngines(config, tell)


class FolderWeights(WeightStream):
    """Weight stream that reads the weights from a folder and sends them from this process, bucket
    by bucket. One FolderWeights object serves one weight update.

    Args:
        folder: the folder to read, which is checked against `shape` tensor by tensor.
        dtype: the dtype that the weights are cast to. A trainer with this dtype casts the weights
            in the same way.
        bucket_bytes: size limit of a bucket. A tensor above the limit gets its own bucket.
        share: a function that stores a bucket for all engines.

    Raises:
        DataError: a tensor is missing or has another shape.
    """

    def __init__(
        self,
        folder: Path,
        shape: ModelShape,
        dtype: torch.dtype,
        bucket_bytes: int,
        share: Callable[[Any], Handle],
    ) -> None:
        sizes = {name: entry.shape for name, entry in check_folder(folder, shape).items()}
        self.layouts = _laid_out(sizes, dtype, bucket_bytes)
        self._folder, self._share = HfFolder(folder), share
        self._checksums: dict[str, str] = {}
        self._sender: Sender | None = None

    def buckets(self, checksums: bool = True) -> Iterator[tuple[Handle, list[Handle]]]:
        """See WeightStream. This process fills every bucket by itself, so no bucket needs a call to
        another process."""
        for bucket in self._read():
            self._checksums |= (
                bucket.checksums()
                if checksums
                else dict.fromkeys((n for n, _ in bucket.tensors()), "")
            )
            yield self._share(bucket.flat), []

    def checksums(self) -> dict[str, str]:
        """See WeightStream."""
        return self._checksums

    def prepare(self, target: SyncTarget, prove: bool) -> None:
        """Does nothing, because the stream reads the files only while it sends the weights."""

    def send_to(self, target: SyncTarget, prove: bool) -> list[Any]:
        """See WeightStream. Only this process sends weights."""
        self._sender = target.sender(0)
        self._sender.expect(prove, None)
        self._sender.begin()
        for bucket in self._read():
            self._sender.send(bucket)
        told = [self._sender.end()]
        if not target.leaves_files:
            self.forget()
        return told

    def forget(self) -> None:
        """See WeightStream. Also closes the sender."""
        if self._sender is not None:
            sender, self._sender = self._sender, None
            sender.forget()
            sender.close()

    def _read(self) -> Iterator[Bucket]:
        for layout in self.layouts:
            bucket = Bucket(layout, torch.empty(layout.numel, dtype=layout.dtype))
            for name, room in bucket.tensors():
                room.copy_(self._folder.slice(name)[:])
            yield bucket


def _laid_out(
    sizes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, bucket_bytes: int
) -> tuple[BucketLayout, ...]:
    """Packs tensors in order into buckets of at most `bucket_bytes`. A tensor larger than
    `bucket_bytes` gets its own bucket."""
    parts: list[list[Slot]] = [[]]
    for name, size in sizes.items():
        start = parts[-1][-1].start + parts[-1][-1].numel if parts[-1] else 0
        slot = Slot(name, size, start)
        if parts[-1] and (start + slot.numel) * dtype.itemsize > bucket_bytes:
            parts.append([])
            slot = Slot(name, size, 0)
        parts[-1].append(slot)
    return tuple(BucketLayout(dtype, tuple(slots)) for slots in parts)
