"""Plans the weight stream. The plan lists the buckets of the stream. For each bucket, the plan
lists the Hugging Face tensors in the bucket. For each tensor, the plan lists the tensor's pieces,
and the rank that sends each piece.

Each rank reports its pieces to the sender, once per plan. The sender cuts the stream into buckets
and sends the plan to all ranks. This module transfers only names, shapes and dtypes. The module
stream.py transfers the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.models import family_of, rule_for
from megatron_stare.models.rules import blocks
from megatron_stare.models.shape import ModelShape

SENDER = 0  # rank of the group that gathers every bucket


@dataclass(frozen=True)
class Shard:
    """A Megatron tensor of this rank. If the whole tensor is split over the tensor-parallel ranks,
    this rank holds one part of the whole tensor.

    `part`: index of this rank's part.
    `parts`: number of parts of the whole tensor; 1 if the whole tensor is not split.
    """

    name: str  # with the whole model's layer and expert numbers
    tensor: Tensor
    part: int
    parts: int


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in a bucket, counted in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket. A bucket contains complete tensors of one dtype, one after the other. A
    receiver needs only the layout and the bytes of the bucket."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def tensors(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the tensors with their names, as views of the bucket."""
        return [
            (slot.name, flat[slot.start : slot.start + slot.numel].view(slot.shape))
            for slot in self.slots
        ]


@dataclass(frozen=True)
class Piece:
    """Part of one Hugging Face tensor. The part is stored on rank `rank`, in the Megatron tensor
    `parameter`, as the block with index `number` (see models/rules.py)."""

    rank: int
    parameter: str
    number: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class PlannedTensor:
    """A Hugging Face tensor and its pieces.

    `cut`: index of the dimension along which the tensor is cut into pieces.
    `pieces`: the pieces, ordered by their positions along this dimension. The pieces of a fused
        tensor are grouped by `Piece.number`.
    """

    name: str
    dtype: torch.dtype
    cut: int
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.pieces[0].shape)
        shape[self.cut] = sum(piece.shape[self.cut] for piece in self.pieces)
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlannedBucket:
    """Layout of a bucket, and the bucket's tensors with the pieces of each tensor. For each Slot of
    the layout, `tensors` contains one PlannedTensor."""

    layout: BucketLayout
    tensors: tuple[PlannedTensor, ...]

    def pieces(self, rank: int) -> list[Piece]:
        """Returns the pieces that a rank contributes to the bucket, in order."""
        return [piece for tensor in self.tensors for piece in tensor.pieces if piece.rank == rank]


@dataclass(frozen=True)
class StreamPlan:
    """Plan of the stream, the same on every rank."""

    buckets: tuple[PlannedBucket, ...]
    shape: ModelShape

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        return tuple(bucket.layout for bucket in self.buckets)


def plan_stream(
    shards: Sequence[Shard], shape: ModelShape, bucket_bytes: int, group: ProcessGroup | None = None
) -> StreamPlan:
    """Plans the stream of the tensors that the ranks of `group` hold. All ranks of `group` must
    call this function.

    Args:
        shards: this rank's shards. Replicas of other ranks' shards are not streamed.
        bucket_bytes: maximum size of a bucket. A bucket may be larger if it contains a single
            tensor, or only tensors that a server must receive together in one call.
        group: ranks that together hold the model; None if this process alone holds the model.

    Raises:
        ValueError: no rank holds a part of a tensor. Only the sender raises this error.
    """
    if group is None:
        return plan_of([held_pieces(shards, shape, SENDER)], shape, bucket_bytes)
    rank = dist.get_rank(group)
    everyone: list | None = [None] * dist.get_world_size(group) if rank == SENDER else None
    dist.gather_object(held_pieces(shards, shape, rank), everyone, group=group, group_dst=SENDER)
    plan = [plan_of(everyone, shape, bucket_bytes) if everyone is not None else None]
    dist.broadcast_object_list(plan, group=group, group_src=SENDER)
    assert plan[0] is not None
    return plan[0]


def plan_of(
    held_by_ranks: Sequence[Sequence[Held]], shape: ModelShape, bucket_bytes: int
) -> StreamPlan:
    """Returns the plan of the stream. `held_by_ranks` contains the pieces that each rank holds, in
    the order of the ranks.

    Raises:
        ValueError: no rank holds a part of a tensor.
    """
    return StreamPlan(_buckets(_units(_tensors(held_by_ranks), shape), bucket_bytes), shape)


@dataclass(frozen=True)
class Held:
    """A piece of the Hugging Face tensor `hf`. One rank holds the piece. Other ranks may hold the
    same piece, so the plan later chooses the rank that sends the piece. The tensor is split along
    dimension `cut` into `parts` parts, one for each tensor-parallel rank. The tensor-parallel rank
    with index `part` holds the piece. A fused tensor consists of sections, such as q, k and v. Each
    section is split over the ranks separately. If the tensor is replicated, `parts` is 1."""

    hf: str
    dtype: torch.dtype
    cut: int
    part: int
    parts: int
    piece: Piece


def held_pieces(shards: Sequence[Shard], shape: ModelShape, rank: int) -> list[Held]:
    """Splits a rank's shards into pieces of Hugging Face tensors. The returned list includes pieces
    of which other ranks hold a copy."""
    held = []
    for shard in shards:
        rule = rule_for(shard.name, shape)
        part, parts = (0, 1) if rule.layout == "replicated" else (shard.part, shard.parts)
        columns = shard.tensor.shape[1:]
        found = blocks(
            rule, torch.empty_like(shard.tensor, device="meta"), shape, shard.part, shard.parts
        )
        for number, (hf, block) in enumerate(zip(rule.sources, found, strict=True)):
            piece = Piece(rank, shard.name, number, (block.numel() // columns.numel(), *columns))
            held.append(Held(hf, shard.tensor.dtype, rule.cut, part, parts, piece))
    return held


def _tensors(held_by_ranks: Sequence[Sequence[Held]]) -> list[PlannedTensor]:
    """Plans every tensor once. If several ranks hold a copy of the same part, only the lowest of
    these ranks sends the part. Under data parallelism, several ranks hold copies of the same parts.
    Tensor-parallel ranks hold copies of replicated tensors, such as norms. The last pipeline stage
    holds a copy of a tied embedding."""
    found: dict[str, dict[tuple[int, int], Held]] = {}
    for held in (one for of_rank in held_by_ranks for one in of_rank):
        found.setdefault(held.hf, {}).setdefault((held.piece.number, held.part), held)
    tensors = []
    for name, parts in found.items():
        one = next(iter(parts.values()))
        places = list(itertools.product(sorted({number for number, _ in parts}), range(one.parts)))
        if missing := [part for number, part in places if (number, part) not in parts]:
            raise ValueError(f"no rank holds part {min(missing)} of {one.parts} of {name}")
        in_order = [parts[place].piece for place in places]
        tensors.append(
            PlannedTensor(
                name, one.dtype, one.cut, tuple(piece for piece in in_order if piece.numel)
            )
        )
    return tensors


def _units(tensors: Sequence[PlannedTensor], shape: ModelShape) -> list[list[PlannedTensor]]:
    """Splits the tensors into groups. If a server must receive several tensors together in one
    call, these tensors form one group. Each of the remaining tensors forms its own group. The
    groups are in the order in which their first tensors occur in `tensors`."""
    family, units = family_of(shape), dict[str, list[PlannedTensor]]()
    for tensor in tensors:
        place = family.served(tensor.name, shape)
        units.setdefault(place.name if place.at_once else tensor.name, []).append(tensor)
    return list(units.values())


def _buckets(units: Sequence[list[PlannedTensor]], bucket_bytes: int) -> tuple[PlannedBucket, ...]:
    """Fills buckets with the units, in order. All units of one dtype come before the units of the
    next dtype. With only one dtype in a bucket, no padding is needed between tensors. A unit (see
    `_units`) is never split."""
    buckets: list[list[PlannedTensor]] = []
    for dtype in dict.fromkeys(unit[0].dtype for unit in units):
        filled = 0
        for number, unit in enumerate(u for u in units if u[0].dtype == dtype):
            nbytes = sum(tensor.nbytes for tensor in unit)
            if number == 0 or filled + nbytes > bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1] += unit
            filled += nbytes
    return tuple(PlannedBucket(_layout(bucket), tuple(bucket)) for bucket in buckets)


def _layout(tensors: Sequence[PlannedTensor]) -> BucketLayout:
    slots, start = [], 0
    for tensor in tensors:
        slots.append(Slot(tensor.name, tensor.shape, start))
        start += slots[-1].numel
    return BucketLayout(tensors[0].dtype, tuple(slots))
