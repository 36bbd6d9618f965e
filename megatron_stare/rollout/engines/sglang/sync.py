"""Defines the interface through which tensor_sync.py, disk_sync.py and broadcast.py send weights to
SGLang servers in buckets.

A weight update involves senders and engines, often in different processes. Senders hold the
tensors. Each server has an engine that manages the server.

    engines `open` -> every sender in turn: `meet`, `send` bucket by bucket, `left` -> engines
    `load`

Each sender creates one `Sending` object per update. Each `Sending` object returns a `Sent` record,
which is passed to the engines.

WeightSync itself never publishes a weight version. The engine publishes the version after the
engine has compared the server's weights with the sent weights. A failed update raises a UserError
and leaves servers with a mixture of old and new weights.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.engines.engine import WeightUpdateError
from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.fingerprint import Fingerprint, Stack, checksums_of
from megatron_stare.rollout.engines.sglang.fp8_weights import as_sent
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# full tensors with their Hugging Face names; views of one flat tensor of one dtype, or as they are
# rounded for servers with 8-bit weights
Bucket = Sequence[tuple[str, Tensor]]


class WeightSync(ABC):
    """Transfers weights to servers. A WeightSync runs only one update at a time. `open` and `meet`
    also clean up after a failed update.

    Args:
        clients: clients of all servers that this object updates.
    """

    def __init__(self, clients: Sequence[SGLangClient]) -> None:
        self._clients = list(clients)

    async def open(self) -> None:
        """Prepares the servers to receive weights. Engines call this method; senders do not."""
        await open_sessions(self._clients)

    @abstractmethod
    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        """Prepares this process to send weights. Senders call this method; engines do not.

        Args:
            layouts: layouts of the servers, in the order of the clients.
        """

    @abstractmethod
    async def send(self, bucket: Bucket, handles: Sequence[str] = ()) -> None:
        """Sends a bucket. Returns when every server has received the bucket, or when the bucket has
        been written to a file. After the call, the caller may reuse the bucket's memory.

        Args:
            handles: handles of the bucket's memory, one for each rank of the server. The ranks open
                the handles instead of receiving bytes. Handles may be given only if this object
                updates a single server.
        """

    def left(self) -> str | None:
        """Returns the path from which the servers fetch the weights, or None if the servers already
        have the weights."""
        return None

    async def load(self, folder: str | None) -> None:
        """Makes the servers use the sent weights from now on. Engines call this method; senders do
        not.

        Args:
            folder: path that `left` returned to the senders.
        """
        await everywhere(*(client.end_weight_update() for client in self._clients))

    def forget(self) -> None:  # noqa: B027 - most methods leave nothing
        """Removes the files that were written for the servers."""

    @abstractmethod
    async def close(self) -> None:
        """Releases the resources that this object keeps from one update to the next."""


@dataclass(frozen=True)
class Sent:
    """Record of what senders sent.

    `sizes`: tensor shapes by name.
    `hashed`: dict that maps each server layout to the expected hashes of each rank's weights; empty
        if values are not verified.
    `folder`: folder that contains the weights; None: the weights were not written to a folder.
    `to`: URL of the only server that received these weights; None: all servers received them.
    """

    sizes: Mapping[str, torch.Size] = field(default_factory=dict)
    hashed: Mapping[ServerLayout, Sequence[Mapping[str, str | Stack]]] = field(default_factory=dict)
    folder: str | None = None
    to: str | None = None

    @classmethod
    def arrived(cls, senders: Sequence[Sent], url: str) -> Sent:
        """Merges the senders' records that apply to the server at `url`.

        Raises:
            WeightUpdateError: another server received other values. The trainer's data-parallel
                copies of the model then differ.
        """
        mine = cls.by_all([one for one in senders if one.to in (None, url)])
        others = [one for one in senders if one.to not in (None, url)]
        held = {layout: checksums_of(ranks) for layout, ranks in mine.hashed.items() if others}
        for other in others:
            for layout in held.keys() & other.hashed.keys():
                pairs = zip(held[layout], checksums_of(other.hashed[layout]), strict=True)
                if wrong := [
                    name for own, theirs in pairs for name in own if own[name] != theirs.get(name)
                ]:
                    raise WeightUpdateError(
                        f"the trainer's copies of the model differ: {wrong[0]} has other values in"
                        f" the copy that was sent to {other.to}",
                        where=url,
                        fix=(
                            "continue from the newest checkpoint; data-parallel ranks must hold the"
                            " same weights"
                        ),
                    )
        return mine

    @classmethod
    def by_all(cls, senders: Sequence[Sent]) -> Sent:
        """Merges the records of several senders. Raises WeightUpdateError if two senders sent the
        same tensor."""
        sizes: dict[str, torch.Size] = {}
        hashed: dict[ServerLayout, list[dict[str, str | Stack]]] = {}
        for one in senders:
            for name in one.sizes.keys() & sizes.keys():
                raise _twice(name)
            sizes |= one.sizes
            for layout, ranks in one.hashed.items():
                for whole, part in zip(
                    hashed.setdefault(layout, [{} for _ in ranks]), ranks, strict=True
                ):
                    for name, hashes in part.items():
                        before = whole.get(name)
                        if isinstance(before, Stack) and isinstance(hashes, Stack):
                            hashes = before.joined(hashes)
                        whole[name] = hashes
        folders = {one.folder for one in senders if one.folder is not None}
        if len(folders) > 1:
            raise WeightUpdateError(f"senders name several folders: {sorted(folders)}")
        return cls(sizes, hashed, next(iter(folders), None))


class Sending:
    """Sends one sender's share of the model's tensors in one update. Hashes the tensors on their
    device while the servers receive the tensors.

    Args:
        layouts: layouts of the servers, in the order of the sync's clients.
        dtype: compute dtype of the servers.
        prove: True: hash the weights.
    """

    def __init__(
        self,
        sync: WeightSync,
        shape: ModelShape,
        dtype: torch.dtype,
        layouts: Sequence[ServerLayout],
        prove: bool,
    ) -> None:
        self._sync, self._layouts, self._shape = sync, layouts, shape
        self._sizes: dict[str, torch.Size] = {}
        self._fingerprints = {
            layout: Fingerprint(shape, dtype, layout) for layout in layouts if prove
        }

    async def begin(self) -> None:
        await self._sync.meet(self._layouts)

    async def send(
        self, bucket: Bucket, hashed: Future[None] | None = None, handles: Sequence[str] = ()
    ) -> None:
        """Sends a bucket.

        Args:
            hashed: future of the bucket's hash, if hashing the bucket has already begun.
            handles: see WeightSync.send.

        Raises:
            WeightUpdateError: a name was already sent in this update.
        """
        for name, tensor in bucket:
            if name in self._sizes:
                raise _twice(name)
            self._sizes[name] = tensor.shape
        sent = bucket
        if not handles and any(layout.eight_bits for layout in self._layouts):
            sent = as_sent(bucket, self._shape)
        # in a thread while the servers receive the bucket
        hashing = (
            asyncio.to_thread(self.hash, bucket) if hashed is None else asyncio.wrap_future(hashed)
        )
        await everywhere(self._sync.send(sent, handles), hashing)

    def hash(self, bucket: Bucket) -> None:
        """Hashes a bucket. Does nothing if the update does not verify the values of the weights.
        Call this method exactly once for each bucket, and never for two buckets at the same
        time."""
        for name, tensor in bucket:
            for fingerprint in self._fingerprints.values():
                fingerprint.add(name, tensor)

    def sent(self) -> Sent:
        """Returns the record of all buckets that were sent."""
        hashed = {
            layout: fingerprint.hashes() for layout, fingerprint in self._fingerprints.items()
        }
        return Sent(self._sizes, hashed, self._sync.left())


def meeting_device(layouts: Sequence[ServerLayout]) -> torch.device:
    """Returns the device from which this process transfers buckets. The device is a GPU if this
    process has a GPU and all servers run on GPUs. Otherwise the device is the CPU."""
    on_gpus = torch.cuda.is_available() and all(layout.device == "cuda" for layout in layouts)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


async def open_sessions(clients: Sequence[SGLangClient]) -> None:
    """Opens a weight-update session on every server. If a server still has an open session from a
    failed update, this function closes the old session and opens a new session."""

    async def open_one(client: SGLangClient) -> None:
        try:
            await client.begin_weight_update()
        except Exception:  # a lasting error recurs in the second attempt
            await client.end_weight_update()
            await client.begin_weight_update()

    await everywhere(*(open_one(client) for client in clients))


def _twice(name: str) -> WeightUpdateError:
    return WeightUpdateError(f"parameter {name!r} was sent twice in one update")
