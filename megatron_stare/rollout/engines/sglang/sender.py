"""A sender's end of one weight update, and what it tells the servers' end of what it sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang.client import everywhere
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint, Stack
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Bucket, WeightSync


@dataclass(frozen=True)
class Sent:
    """What senders sent: shapes by name; by layout of a server the hashes of what each of its ranks holds of it, where
    values are to be proven; and the folder it lies in, if it lies in one."""

    sizes: Mapping[str, torch.Size] = field(default_factory=dict)
    hashed: Mapping[ServerLayout, Sequence[Mapping[str, str | Stack]]] = field(default_factory=dict)
    folder: str | None = None

    @classmethod
    def by_all(cls, senders: Sequence[Sent]) -> Sent:
        """Of several senders. Raises WeightUpdateError for a tensor that two of them sent."""
        sizes: dict[str, torch.Size] = {}
        hashed: dict[ServerLayout, list[dict[str, str | Stack]]] = {}
        for one in senders:
            for name in one.sizes.keys() & sizes.keys():
                raise twice(name)
            sizes |= one.sizes
            for layout, ranks in one.hashed.items():
                for whole, part in zip(hashed.setdefault(layout, [{} for _ in ranks]), ranks, strict=True):
                    for name, hashes in part.items():
                        before = whole.get(name)
                        if isinstance(before, Stack) and isinstance(hashes, Stack):
                            hashes = before.joined(hashes)
                        whole[name] = hashes
        folders = {one.folder for one in senders if one.folder is not None}
        if len(folders) > 1:
            raise WeightUpdateError(f"senders name several folders: {sorted(folders)}")
        return cls(sizes, hashed, next(iter(folders), None))


class Sender:
    """Sends some of the model's tensors, and hashes them meanwhile where they lie.

    Args:
        layouts: of the servers, in the order of the sync's clients.
        dtype: that the servers compute in.
        prove: hash what is sent.
    """

    def __init__(
        self, sync: WeightSync, shape: ModelShape, dtype: torch.dtype, layouts: Sequence[ServerLayout], prove: bool
    ) -> None:
        self._sync, self._layouts = sync, layouts
        self._sizes: dict[str, torch.Size] = {}
        self._fingerprints = {layout: Fingerprint(shape, dtype, layout) for layout in layouts if prove}

    async def begin(self) -> None:
        await self._sync.meet(self._layouts)

    async def send(self, bucket: Bucket, hashed: Future[None] | None = None) -> None:
        """Args: hashed: its hash, where that was begun before.

        Raises:
            WeightUpdateError: a name was sent before.
        """
        for name, tensor in bucket:
            if name in self._sizes:
                raise twice(name)
            self._sizes[name] = tensor.shape
        # in a thread while the servers take the bucket
        hashing = asyncio.to_thread(self.hash, bucket) if hashed is None else asyncio.wrap_future(hashed)
        await everywhere(self._sync.send(bucket), hashing)

    def hash(self, bucket: Bucket) -> None:
        """Where values are to be proven. Every bucket once, one after the other."""
        for name, tensor in bucket:
            for fingerprint in self._fingerprints.values():
                fingerprint.add(name, tensor)

    def sent(self) -> Sent:
        """Of all buckets."""
        hashed = {layout: fingerprint.hashes() for layout, fingerprint in self._fingerprints.items()}
        return Sent(self._sizes, hashed, self._sync.left())


def twice(name: str) -> WeightUpdateError:
    return WeightUpdateError(f"parameter {name!r} was sent twice in one update")
