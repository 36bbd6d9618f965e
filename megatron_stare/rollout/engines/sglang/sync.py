"""The ways of weights into SGLang servers, bucket by bucket: one interface, for tensor_sync.py,
disk_sync.py and broadcast.py.

It has two ends, which may be two processes: senders have the tensors, and each server has one who
watches over it.

    servers `open` -> every sender in turn: `meet`, `send` bucket by bucket, `left` -> servers
    `load`

A sender goes through a Sending, one an update, whose Sent is told the servers' end.

None of them publishes a version; the engine does, after it has compared what the servers hold. A
failure anywhere is an SGLangError, and leaves servers with a mixture of old and new weights.
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
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# whole tensors of one dtype by Hugging Face name, views of one flat tensor
Bucket = Sequence[tuple[str, Tensor]]


class WeightSync(ABC):
    """One update after the other; `open` and `meet` also clean up after one that failed.

    Args:
        clients: of the servers that this end speaks to: a sender's are all of them.
    """

    def __init__(self, clients: Sequence[SGLangClient]) -> None:
        self._clients = list(clients)

    async def open(self) -> None:
        """The servers' end: they may be sent weights when this returns."""
        await open_sessions(self._clients)

    @abstractmethod
    async def meet(self, layouts: Sequence[ServerLayout]) -> None:
        """A sender's end: it may send when this returns. Args: layouts: of the servers, in the
        order of the clients."""

    @abstractmethod
    async def send(self, bucket: Bucket, handles: Sequence[str] = ()) -> None:
        """Returns when every server has taken the bucket, whose memory may be used again.

        Args:
            handles: of the bucket's memory, for each rank of the one server, which opens them in
                its place.
        """

    def left(self) -> str | None:
        """Path of what was sent, for the servers to fetch; None: they have it."""
        return None

    async def load(self, folder: str | None) -> None:
        """The servers' end: they compute with what was sent when this returns. Args: folder: that
        senders named."""
        await everywhere(*(client.end_weight_update() for client in self._clients))

    def forget(self) -> None:  # noqa: B027 - most leave nothing
        """Removes what was left for the servers."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of what the method holds between updates."""


@dataclass(frozen=True)
class Sent:
    """An account of what senders sent: shapes by name; by layout of a server the hashes of what
    each of its ranks holds of it, where values are to be proven; the folder it lies in, if it lies
    in one; and the URL of the one server that it was sent to, None: all were sent it."""

    sizes: Mapping[str, torch.Size] = field(default_factory=dict)
    hashed: Mapping[ServerLayout, Sequence[Mapping[str, str | Stack]]] = field(default_factory=dict)
    folder: str | None = None
    to: str | None = None

    @classmethod
    def arrived(cls, senders: Sequence[Sent], url: str) -> Sent:
        """Joins what was sent to the server at this URL.

        Raises:
            WeightUpdateError: another server was sent other values, so copies of the model differ
                in the trainer.
        """
        mine = cls.by_all([one for one in senders if one.to in (None, url)])
        for other in senders:
            for layout in (
                mine.hashed.keys() & other.hashed.keys() if other.to not in (None, url) else ()
            ):
                pairs = zip(
                    checksums_of(mine.hashed[layout]),
                    checksums_of(other.hashed[layout]),
                    strict=True,
                )
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
        """Joins those of several senders. Raises WeightUpdateError for a tensor that two of them
        sent."""
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
    """A sender's end of one update: sends some of the model's tensors, and hashes them meanwhile
    where they lie.

    Args:
        layouts: of the servers, in the order of the sync's clients.
        dtype: that the servers compute in.
        prove: hash what is sent.
    """

    def __init__(
        self,
        sync: WeightSync,
        shape: ModelShape,
        dtype: torch.dtype,
        layouts: Sequence[ServerLayout],
        prove: bool,
    ) -> None:
        self._sync, self._layouts = sync, layouts
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
            hashed: its hash, where that was begun before.
            handles: see WeightSync.send.

        Raises:
            WeightUpdateError: a name was sent before.
        """
        for name, tensor in bucket:
            if name in self._sizes:
                raise _twice(name)
            self._sizes[name] = tensor.shape
        # in a thread while the servers take the bucket
        hashing = (
            asyncio.to_thread(self.hash, bucket) if hashed is None else asyncio.wrap_future(hashed)
        )
        await everywhere(self._sync.send(bucket, handles), hashing)

    def hash(self, bucket: Bucket) -> None:
        """Hashes a bucket where values are to be proven. Every bucket once, one after the other."""
        for name, tensor in bucket:
            for fingerprint in self._fingerprints.values():
                fingerprint.add(name, tensor)

    def sent(self) -> Sent:
        """Accounts for all buckets."""
        hashed = {
            layout: fingerprint.hashes() for layout, fingerprint in self._fingerprints.items()
        }
        return Sent(self._sizes, hashed, self._sync.left())


def meeting_device(layouts: Sequence[ServerLayout]) -> torch.device:
    """The device on which buckets are handed over: this process's GPU where it has one and all
    servers run on GPUs, else here."""
    on_gpus = torch.cuda.is_available() and all(layout.device == "cuda" for layout in layouts)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")


async def open_sessions(clients: Sequence[SGLangClient]) -> None:
    """Opens a weight-update session on every server; one that a failed update left open is ended
    first."""

    async def open_one(client: SGLangClient) -> None:
        try:
            await client.begin_weight_update()
        except Exception:  # whatever it was: if it lasts, the second attempt says so
            await client.end_weight_update()
            await client.begin_weight_update()

    await everywhere(*(open_one(client) for client in clients))


def _twice(name: str) -> WeightUpdateError:
    return WeightUpdateError(f"parameter {name!r} was sent twice in one update")
