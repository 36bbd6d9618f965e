"""Streams the weights of the live policy as complete Hugging Face tensors. The tensors are gathered
over tensor, pipeline and expert parallel ranks.

Tensors are sent in flat buckets of bounded size (stream_plan.py). The function `stream` gathers
every bucket on one rank, the sender, because engines receive each bucket from one process. No rank
holds more than a few buckets in memory besides its own shards. For each bucket, every other rank
with pieces of the bucket packs all of these pieces into one message to the sender. The messages of
the next bucket are sent while the caller uses the current bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.models import rule_for
from megatron_stare.models.rules import blocks
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.sync.stream_plan import (
    SENDER,
    BucketLayout,
    Piece,
    PlannedBucket,
    Shard,
    StreamPlan,
)


def tensor_checksum(tensor: Tensor) -> str:
    """Returns the first 64 bits of the SHA-256 of a tensor's dtype, shape and bytes, as 16
    hexadecimal digits.

    The trainer computes the checksum of each tensor that it sends. The engine computes the checksum
    of each tensor that it holds after the update.

    The checksum changes if any bit, the dtype or the shape changes. Tensors with equal values but
    different strides have the same checksum. A contiguous CPU tensor is hashed in place, without a
    copy. On a core with SHA instructions, SHA-256 hashes 1.2 to 1.5 GB/s and is more than twice as
    fast as BLAKE2.
    """
    # hashlib releases the GIL. The header distinguishes float32 [2, 3] from float32 [3, 2] and from
    # int32 with the same bytes.
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Bucket:
    """Complete tensors of one dtype, stored one after the other in one flat tensor."""

    layout: BucketLayout
    flat: Tensor

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns the tensors with their names, as views of the bucket."""
        return self.layout.tensors(self.flat)

    def checksums(self) -> dict[str, str]:
        """Returns the checksums of the tensors by name. An engine computes the checksums of its own
        tensors in the same way."""
        return {name: tensor_checksum(tensor) for name, tensor in self.tensors()}


# allocates a bucket's memory: elements, dtype, device
Rooms = Callable[[int, torch.dtype, torch.device], Tensor]


def new_room(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates new memory for a bucket."""
    return torch.empty(numel, dtype=dtype, device=device)


class RoomsByTurns:
    """Provides host memory for buckets by alternating between two buffers. The third bucket reuses
    the memory of the first bucket, so a caller must finish with the first bucket before requesting
    the third. For buckets on a GPU, every request allocates new memory, because allocation costs
    nothing on a GPU."""

    def __init__(self) -> None:
        self._rooms = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return new_room(numel, dtype, device)
        room = self._rooms.pop(0)
        if room.numel() < numel * dtype.itemsize:
            room = torch.empty(numel * dtype.itemsize, dtype=torch.uint8)
        self._rooms.append(room)
        return room[: numel * dtype.itemsize].view(dtype)


def stream(
    plan: StreamPlan,
    shards: Sequence[Shard],
    group: ProcessGroup | None = None,
    rooms: Rooms = new_room,
) -> Iterator[Bucket | None]:
    """Yields the plan's buckets, in order, on the sender. On every rank except the sender, yields
    None for each bucket.

    All ranks of the group must exhaust the iterator. Different ranks may be at different buckets at
    the same time. A rank that sends pieces keeps at most two messages in flight. Shards must keep
    their values until the iterator is exhausted. The caller owns each bucket. If the caller drops
    each bucket before requesting the next bucket, at most two buckets are in memory.

    Args:
        shards: this rank's shards of the plan, with the values to send.
        group: process group of the plan.
        rooms: allocates memory for a bucket on the sender.
    """
    mine = {shard.name: shard for shard in shards}
    if group is None or dist.get_rank(group) == SENDER:
        return _gather(plan, mine, group, rooms)
    return _give(plan, mine, group)


def everywhere(
    plan: StreamPlan,
    shards: Sequence[Shard],
    group: ProcessGroup | None = None,
    rooms: Rooms = new_room,
) -> Iterator[Bucket]:
    """Yields the plan's buckets, in order, on every rank of the group. All ranks must exhaust the
    iterator.

    Each rank sends its pieces of a bucket in one broadcast. Messages of two buckets are never in
    flight at the same time. All ranks therefore start their broadcasts in the same order, as NCCL
    requires.

    Args:
        plan, shards, group, rooms: see `stream`.
    """
    mine = {shard.name: shard for shard in shards}
    device = next(iter(mine.values())).tensor.device
    rank = SENDER if group is None else dist.get_rank(group)
    for bucket in plan.buckets:
        givers = sorted({piece.rank for tensor in bucket.tensors for piece in tensor.pieces})
        sizes = {giver: [piece.numel for piece in bucket.pieces(giver)] for giver in givers}
        parcels = {
            g: torch.empty(sum(s), dtype=bucket.layout.dtype, device=device)
            for g, s in sizes.items()
        }
        if rank in parcels:
            for piece, part in zip(
                bucket.pieces(rank), parcels[rank].split(sizes[rank]), strict=True
            ):
                held = _values(piece, mine, plan.shape)
                part.view(held.shape).copy_(held)
        if group is not None:
            works = [
                dist.broadcast(parcels[g], group=group, group_src=g, async_op=True) for g in givers
            ]
            for work in works:
                work.wait()
        flat = rooms(bucket.layout.numel, bucket.layout.dtype, device)
        coming = {giver: iter(parcels[giver].split(sizes[giver])) for giver in givers}
        for tensor, (_, whole) in zip(bucket.tensors, bucket.layout.tensors(flat), strict=True):
            parts = whole.split(
                [piece.shape[tensor.cut] for piece in tensor.pieces], dim=tensor.cut
            )
            for piece, part in zip(tensor.pieces, parts, strict=True):
                part.copy_(next(coming[piece.rank]).view(piece.shape))
        yield Bucket(bucket.layout, flat)


def _gather(
    plan: StreamPlan, mine: Mapping[str, Shard], group: ProcessGroup | None, rooms: Rooms
) -> Iterator[Bucket]:
    device = next(iter(mine.values())).tensor.device
    coming = [_Parcels(plan.buckets[0], group, device)]
    for number, bucket in enumerate(plan.buckets):
        # popped, so that these messages are freed before the next ones are received
        room = rooms(bucket.layout.numel, bucket.layout.dtype, device)
        gathered = Bucket(bucket.layout, _filled(room, bucket, coming.pop(), mine, plan.shape))
        coming += [
            _Parcels(following, group, device)
            for following in plan.buckets[number + 1 : number + 2]
        ]
        yield gathered
        del gathered  # if the caller dropped it too, the next bucket reuses its memory


def _filled(
    flat: Tensor,
    bucket: PlannedBucket,
    parcels: _Parcels,
    mine: Mapping[str, Shard],
    shape: ModelShape,
) -> Tensor:
    """Fills the flat bucket and copies each piece only once. A piece that the sender holds is
    copied from the sender's shard. A piece that another rank holds is copied from the message of
    that rank."""
    parcels.wait()
    for tensor, (_, whole) in zip(bucket.tensors, bucket.layout.tensors(flat), strict=True):
        rooms = whole.split([piece.shape[tensor.cut] for piece in tensor.pieces], dim=tensor.cut)
        for piece, room in zip(tensor.pieces, rooms, strict=True):
            held = _values(piece, mine, shape) if piece.rank == SENDER else parcels.take(piece)
            room.view(held.shape).copy_(held)
    return flat


def _give(plan: StreamPlan, mine: Mapping[str, Shard], group: ProcessGroup) -> Iterator[None]:
    rank = dist.get_rank(group)
    under_way: list[_Sent] = []
    for bucket in plan.buckets:
        if given := bucket.pieces(rank):
            if len(under_way) == 2:
                under_way.pop(0).wait()
            under_way.append(_Sent(given, mine, plan.shape, group))
        yield None
    for sent in under_way:
        sent.wait()


class _Parcels:
    """Receives a bucket's pieces from the other ranks. Each rank that holds pieces sends all its
    pieces in one message. The constructor starts all receive operations without waiting for the
    messages."""

    def __init__(
        self, bucket: PlannedBucket, group: ProcessGroup | None, device: torch.device
    ) -> None:
        ranks = sorted(
            {piece.rank for tensor in bucket.tensors for piece in tensor.pieces} - {SENDER}
        )
        sizes = {rank: [piece.numel for piece in bucket.pieces(rank)] for rank in ranks}
        buffers = {
            r: torch.empty(sum(s), dtype=bucket.layout.dtype, device=device)
            for r, s in sizes.items()
        }
        self._works = _post(dist.irecv, buffers, group)
        self._pieces = {rank: iter(buffers[rank].split(sizes[rank])) for rank in ranks}

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def take(self, piece: Piece) -> Tensor:
        """Returns the values of `piece`, from the message of the rank that holds the piece. The
        pieces of a rank must be taken in the order in which the rank sent the pieces."""
        return next(self._pieces[piece.rank]).view(piece.shape)


class _Sent:
    """Sends this rank's pieces of a bucket, in one message, to the rank `SENDER`, which gathers the
    bucket. The message contains copies of the pieces. The constructor starts to send the message,
    and does not wait until the message has been sent."""

    def __init__(
        self,
        given: Sequence[Piece],
        mine: Mapping[str, Shard],
        shape: ModelShape,
        group: ProcessGroup,
    ) -> None:
        one = mine[given[0].parameter].tensor
        message = torch.empty(
            sum(piece.numel for piece in given), dtype=one.dtype, device=one.device
        )
        for piece, room in zip(given, message.split([piece.numel for piece in given]), strict=True):
            held = _values(piece, mine, shape)
            room.view(held.shape).copy_(held)
        self._message = message  # kept alive until it is sent
        self._works = _post(dist.isend, {SENDER: message}, group)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _post(
    operation: Callable[..., Any], buffers: Mapping[int, Tensor], group: ProcessGroup | None
) -> list[dist.Work]:
    """Starts one transfer for each entry of `buffers`. `operation` is dist.isend or dist.irecv.
    Each key of `buffers` is the rank to which dist.isend sends, or from which dist.irecv receives.
    Each value is the buffer that dist.isend sends, or that dist.irecv fills."""
    operations = [
        dist.P2POp(operation, buffer, group=group, group_peer=rank)
        for rank, buffer in buffers.items()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _values(piece: Piece, mine: Mapping[str, Shard], shape: ModelShape) -> Tensor:
    """Returns the values of `piece` from this rank's shard. The returned tensor is a view of the
    shard, unless Megatron has split a query group over ranks. Megatron stores the query, key and
    value weights of a layer in one fused parameter. For a piece of such a fused parameter, the
    returned tensor can have the three leading dimensions [query groups, heads, head_dim] instead of
    one dimension for the rows."""
    shard = mine[piece.parameter]
    return blocks(rule_for(shard.name, shape), shard.tensor, shape, shard.part, shard.parts)[
        piece.number
    ]
