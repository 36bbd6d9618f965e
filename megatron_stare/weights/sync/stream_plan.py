"""Which rank holds which part of which Hugging Face tensor, and which tensors a bucket of the
weight stream holds.

Ranks tell the sender once what they hold; it cuts the stream into buckets and tells them. Only
names, shapes and dtypes travel here; stream.py moves the weights by the plan.
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

SENDER = 0  # the rank of the group on which every bucket ends


@dataclass(frozen=True)
class Shard:
    """A Megatron tensor of this rank: the `part`-th of `parts` over tensor-parallel ranks."""

    name: str  # with layer and expert numbers of the whole model
    tensor: Tensor
    part: int
    parts: int


@dataclass(frozen=True)
class Slot:
    """A tensor's place in a bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Layout of a bucket: whole tensors of one dtype, end to end. All that a receiver needs besides
    the bytes."""

    dtype: torch.dtype
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def tensors(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors by name, as views of the bucket."""
        return [
            (slot.name, flat[slot.start : slot.start + slot.numel].view(slot.shape))
            for slot in self.slots
        ]


@dataclass(frozen=True)
class Piece:
    """A part of one Hugging Face tensor: the `number`-th block (models/rules.py) of a Megatron
    tensor of `rank`."""

    rank: int
    parameter: str
    number: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class PlannedTensor:
    """A Hugging Face tensor and its pieces in order along dimension `cut`: those of a fused one
    part by part."""

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
    """A bucket's layout, and where each of its tensors (one a slot) comes from."""

    layout: BucketLayout
    tensors: tuple[PlannedTensor, ...]

    def pieces(self, rank: int) -> list[Piece]:
        """Pieces that a rank gives to the bucket, in order."""
        return [piece for tensor in self.tensors for piece in tensor.pieces if piece.rank == rank]


@dataclass(frozen=True)
class StreamPlan:
    """The same on every rank."""

    buckets: tuple[PlannedBucket, ...]
    shape: ModelShape

    @property
    def layouts(self) -> tuple[BucketLayout, ...]:
        return tuple(bucket.layout for bucket in self.buckets)


def plan_stream(
    shards: Sequence[Shard], shape: ModelShape, bucket_bytes: int, group: ProcessGroup | None = None
) -> StreamPlan:
    """Plans the stream of what the ranks of `group` hold. All of them must call it.

    Args:
        shards: this rank's; replicas of other ranks' are left out of the stream.
        bucket_bytes: no bucket is larger, but one that holds a single tensor, or those that a
            server takes in one call alone: engines take tensors whole.
        group: ranks that hold the model between them; None: this process alone.

    Raises:
        ValueError: on the sender, where no rank holds a part of a tensor.
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
    """The plan that follows from what every rank holds, in order of rank.

    Raises:
        ValueError: no rank holds a part of a tensor.
    """
    return StreamPlan(_buckets(_units(_tensors(held_by_ranks), shape), bucket_bytes), shape)


@dataclass(frozen=True)
class Held:
    """A piece that a rank could give, and where it belongs: `part` of `parts` along dimension `cut`
    of tensor `hf`."""

    hf: str
    dtype: torch.dtype
    cut: int
    part: int
    parts: int
    piece: Piece


def held_pieces(shards: Sequence[Shard], shape: ModelShape, rank: int) -> list[Held]:
    """Pieces of Hugging Face tensors that a rank holds, replicas of other ranks' pieces
    included."""
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
    """Every tensor once, each part from the lowest rank that holds it: data-parallel replicas,
    replicated norms and the last pipeline stage's copy of a tied embedding are not sent."""
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
    """The tensors, in the order of the first of those that servers take in one call alone."""
    family, units = family_of(shape), dict[str, list[PlannedTensor]]()
    for tensor in tensors:
        place = family.served(tensor.name, shape)
        units.setdefault(place.name if place.at_once else tensor.name, []).append(tensor)
    return list(units.values())


def _buckets(units: Sequence[list[PlannedTensor]], bucket_bytes: int) -> tuple[PlannedBucket, ...]:
    """In the order of the units, none of which is torn, one dtype after the other: a bucket needs
    no padding between its tensors."""
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
