"""Sequences laid end to end (thd), as Megatron's packed_seq_params and as our CPU attention want them.

Shape legend: t tokens of a micro-batch, b sequences of a group, s the longest of a group; under context parallelism m
positions of the longest that this rank holds, and t / C tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_stare.megatron.batching.shared_prompts import SharedColumns
from megatron_stare.megatron.batching.spread import Spread
from megatron_stare.megatron.batching.zigzag import WHOLE, Zigzag

PADDING_LIMIT = 1.25  # a group of sequences is padded by at most this factor for one attention call


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters, and the tokens' places in an attention over padded groups.

    Without `cu_seqlens_q` rotary embeddings are those of each token's position (megatron/model/model.py): Megatron's
    own for packed sequences without fusion cuts the tokens into sequences in every layer, and on a device waits for it.

    queries: of this rank's tokens; padding repeats a sequence's last one.
    keys, positions: under context parallelism alone, where queries are a part of the keys.
    """

    queries: Spread | None = None
    keys: Spread | None = None  # of the tokens of all ranks, laid end to end in order of rank
    positions: tuple[Tensor, ...] = ()  # each [b, m] int64 on the host: where a group's queries stand in their sequence

    def pinned(self) -> PackedSequences:
        """In memory that a GPU copies from by itself."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, *, bounds: bool) -> PackedSequences:
        """On a device.

        Args:
            bounds: with cu_seqlens, which Transformer Engine's kernels read there.
        """
        other = self._each(lambda tensor: tensor.to(device, non_blocking=True))
        if not bounds:
            other.cu_seqlens_q = other.cu_seqlens_kv = None
        return other

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedSequences:
        """A copy with other tensors."""
        assert self.queries is not None and self.cu_seqlens_q is not None
        other = copy(self)
        other.cu_seqlens_q = other.cu_seqlens_kv = change(self.cu_seqlens_q)
        other.queries = self.queries.each(change)
        other.keys = self.keys.each(change) if self.keys is not None else None
        return other


def pack(
    lengths: list[int], device: torch.device, place: Zigzag = WHOLE, shared: SharedColumns | None = None
) -> PackedSequences:
    """The description of sequences of these lengths laid end to end, in order.

    Args:
        place: which of their positions this rank holds.
        shared: which of the tokens the model is fed, and in the place of which others; not where ranks hold parts.
    """
    held = [length // place.ranks for length in lengths]
    groups = _alike(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    queries = _spread(held, groups)
    if shared is not None:
        index, inverse = shared.stands[queries.index], queries.inverse[shared.fed]
        queries = replace(queries, index=index, inverse=inverse, repeated=True)
    packed = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        queries=queries,
    )
    if place.ranks > 1:
        packed.keys = _spread(lengths, groups, place.order(lengths))
        packed.positions = tuple(
            pad_sequence([place.positions(lengths[i]) for i in members], batch_first=True) for members in groups
        )
    return packed._each(lambda tensor: tensor.to(device))


def _spread(lengths: list[int], groups: list[list[int]], order: Tensor | None = None) -> Spread:
    """Sequences of these lengths in these groups.

    Args:
        order: [t] int64 where every token really stands; None: in order.
    """
    index, shapes = [], []
    inverse = torch.empty(sum(lengths), dtype=torch.int64)
    done = 0
    for members in groups:
        where, real = _rows(lengths, members)
        where = where if order is None else order[where]
        inverse[where[real]] = done + real.flatten().nonzero().squeeze(1)
        index.append(where.flatten())
        shapes.append((where.shape[0], where.shape[1]))
        done += where.numel()
    return Spread(torch.cat(index), inverse, tuple(shapes))


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
