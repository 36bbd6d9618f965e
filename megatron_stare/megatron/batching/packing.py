"""Sequences laid end to end (thd), as Megatron's packed_seq_params and as our CPU attention want them.

Shape legend: t tokens of a micro-batch, b sequences of a group, s the longest of a group; under context parallelism m
positions of the longest that this rank holds, and t / C tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_stare.megatron.batching.zigzag import WHOLE, Zigzag

PADDING_LIMIT = 1.25  # a group of sequences is padded by at most this factor for one attention call


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters, and the gather and scatter indices for an attention over padded groups.

    keys, positions: of every group, under context parallelism alone: its queries are then a part of its keys.
    """

    groups: tuple[Tensor, ...] = ()  # each [b, s] int64 into this rank's tokens; padding repeats a sequence's last one
    inverse: Tensor | None = None  # [t] int64: where every token stands in the groups' outputs laid end to end
    keys: tuple[Tensor, ...] = ()  # each [b, s] int64 into the tokens of all ranks, laid end to end in order of rank
    positions: tuple[Tensor, ...] = ()  # each [b, m] int64 on the host: where a group's queries stand in their sequence

    def pinned(self) -> PackedSequences:
        """In memory that a GPU copies from by itself."""
        return self._each(lambda tensor: tensor.pin_memory(), lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, *, bounds: bool) -> PackedSequences:
        """On a device.

        Args:
            bounds: cu_seqlens too, which Transformer Engine's kernels read there. Megatron's rotary embedding without
                fusion reads them on the host, once a layer: on a device each time would wait for it.
        """

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return self._each(moved, moved if bounds else lambda tensor: tensor)

    def _each(self, change: Callable[[Tensor], Tensor], change_bounds: Callable[[Tensor], Tensor]) -> PackedSequences:
        """A copy with other tensors; indices are changed by the first, cu_seqlens by the second."""
        assert self.inverse is not None
        other = copy(self)
        other.cu_seqlens_q = other.cu_seqlens_kv = change_bounds(self.cu_seqlens_q)
        other.groups = tuple(change(group) for group in self.groups)
        other.inverse = change(self.inverse)
        return other


def pack(lengths: list[int], device: torch.device, place: Zigzag = WHOLE) -> PackedSequences:
    """The description of sequences of these lengths laid end to end, in order.

    Args:
        place: which of their positions this rank holds.
    """
    held = [length // place.ranks for length in lengths]
    groups, keys, positions = [], [], []
    inverse = torch.empty(sum(held), dtype=torch.int64)
    order = place.order(lengths)
    done = 0
    for members in _alike(lengths):
        index, real = _rows(held, members)
        inverse[index[real]] = done + real.flatten().nonzero().squeeze(1)
        groups.append(index.to(device))
        done += index.numel()
        if place.ranks > 1:
            own = [place.positions(lengths[i]) for i in members]
            positions.append(torch.stack([torch.nn.functional.pad(x, (0, index.shape[1] - len(x))) for x in own]))
            keys.append(order[_rows(lengths, members)[0]].to(device))
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        groups=tuple(groups),
        inverse=inverse.to(device),
        keys=tuple(keys),
        positions=tuple(positions),
    )


def _rows(lengths: list[int], members: list[int]) -> tuple[Tensor, Tensor]:
    """[b, s] int64 where the tokens of some of the sequences stand, and [b, s] bool which of these are not padding."""
    sizes = torch.tensor(lengths)
    starts, size = (sizes.cumsum(0) - sizes)[members][:, None], sizes[members][:, None]
    column = torch.arange(int(size.max()))
    return starts + torch.minimum(column, size - 1), column < size


def _alike(lengths: list[int]) -> list[list[int]]:
    """Numbers of the sequences in groups of like length, so that padding a group to its longest costs little."""
    groups: list[list[int]] = []
    longest = tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and longest * (len(groups[-1]) + 1) <= PADDING_LIMIT * (tokens + lengths[i]):
            groups[-1].append(i)
            tokens += lengths[i]
        else:
            groups.append([i])
            longest = tokens = lengths[i]
    return groups
