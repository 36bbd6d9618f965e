"""Sequences laid end to end (thd), as Megatron's packed_seq_params and as our CPU attention want
them.

Prompts that several responses of a micro-batch have in common are passed through the model once: a
prompt's hidden states depend on nothing behind it, so those of one sample serve all samples of its
group. Layers are given it once, and attention alone, in which responses look back at it, repeats
its queries, keys and values.

For attention on a CPU tokens are spread to padded groups of sequences, and back, with backward
passes that only copy. Indexing would add every gradient into a tensor of zeros, row by row; here it
is known where each came from.

Shape legend: t tokens of a micro-batch, b sequences of a group, s the longest of a group; under
context parallelism m positions of the longest that this rank holds, and t / C tokens of the
micro-batch. p places of all groups laid end to end, padding included. In `shared_columns` s
positions of a packed row with every prompt before each of its responses, k of them the model is
fed.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.autograd import Function
from torch.nn.utils.rnn import pad_sequence

from megatron_stare.megatron.batching.zigzag import WHOLE, Zigzag

PADDING_LIMIT = 1.25  # a group of sequences is padded by at most this factor for one attention call


@dataclass(frozen=True)
class SharedColumns:
    """The columns of a packed row that the model is fed.

    fed: [k] int64, ascending.
    stands: [s] int64, of every column the place among those fed at which its token, or the same of
        another sample, stands.
    """

    fed: Tensor
    stands: Tensor


def shared_columns(
    sample: Tensor, token: Tensor, prompts: Tensor, groups: Tensor, multiple: int
) -> SharedColumns:
    """Finds the columns to feed, of a row in which sequences stand end to end.

    Args:
        sample: [s] int64 which of the micro-batch's samples, -1: padding.
        token: [s] int64 which of its tokens.
        prompts: [samples] int64 tokens of each one's prompt.
        groups: [samples] int64; samples of one group have one prompt.
        multiple: the number of columns fed is one of this, as that of the row is.
    """
    columns = torch.arange(len(sample))
    same = groups[:, None] == groups[None]
    first = same.int().argmax(dim=1)  # of every sample the first of its group
    ours = sample.clamp_min(0)
    in_prompt = (sample >= 0) & (token < prompts[ours])
    starts = torch.full((len(prompts),), len(sample)).scatter_reduce_(
        0, ours[sample >= 0], columns[sample >= 0], "amin"
    )
    source = torch.where(in_prompt, starts[first[ours]] + token, columns)
    copies = (source != columns).nonzero().squeeze(1)
    kept = copies[len(copies) - len(copies) % multiple :]  # fed all the same
    source[kept] = kept
    fed = (source == columns).nonzero().squeeze(1)
    place = torch.empty_like(columns)
    place[fed] = torch.arange(len(fed))
    return SharedColumns(fed, place[source])


@dataclass(frozen=True)
class Spread:
    """The token that stands at every place of padded groups.

    index: [p] int64, a token.
    inverse: [t] int64, a place of every token: the one that counts where it has several.
    shapes: (b, s) of every group.
    repeated: whether tokens stand at several places whose gradients are not 0 (prompts that
        responses share); padding, whose gradient is 0, repeats tokens as well and does not count.
    """

    index: Tensor
    inverse: Tensor
    shapes: tuple[tuple[int, int], ...]
    repeated: bool = False

    def each(self, change: Callable[[Tensor], Tensor]) -> Spread:
        """The same with its tensors changed: moved, or pinned."""
        return replace(self, index=change(self.index), inverse=change(self.inverse))

    def spread(self, tokens: Tensor, *, collected: bool = False) -> list[Tensor]:
        """[t, ...] -> [b, s, ...] of every group.

        Args:
            collected: a token's gradient comes from the place in `inverse` alone, as that of
                queries does, of whose outputs `collect` takes no other.
        """
        sums = self.repeated and not collected
        places = _Spread.apply(tokens, self.index, None if sums else self.inverse)
        parts = places.split([b * s for b, s in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def collect(self, places: Tensor) -> Tensor:
        """[p, ...] -> [t, ...], of every token the place in `inverse`."""
        return _Collect.apply(places, self.inverse)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, inverse: Tensor | None) -> Tensor:
        ctx.tokens = len(tokens)
        ctx.save_for_backward(index, inverse)
        return tokens.contiguous().index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        if inverse is not None:
            return gradient.contiguous().index_select(0, inverse), None, None
        rows = gradient.reshape(len(index), -1)
        # the sum over a token's places, in their order: the kernel that embeddings have for it
        summed = torch.ops.aten.embedding_dense_backward(rows, index, ctx.tokens, -1, False)
        return summed.unflatten(1, gradient.shape[1:]), None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.places = len(places)
        ctx.save_for_backward(inverse)
        return places.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        empty = gradient.new_zeros(ctx.places, *gradient.shape[1:])
        return empty.index_copy_(0, inverse, gradient), None


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters, and the tokens' places in an attention over padded groups.

    Without `cu_seqlens_q` rotary embeddings are those of each token's position
    (megatron/model/model.py): Megatron's own for packed sequences without fusion cuts the tokens
    into sequences in every layer, and on a device waits for it.

    queries: of this rank's tokens; padding repeats a sequence's last one.
    keys, positions: under context parallelism alone, where queries are a part of the keys.
    """

    queries: Spread | None = None
    keys: Spread | None = None  # of the tokens of all ranks, laid end to end in order of rank
    # [t] int64, where each of them stands in its sequence; for latent attention
    tokens: Tensor | None = None
    # each [b, m] int64 on the host: where a group's queries stand in their sequence
    positions: tuple[Tensor, ...] = ()

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
    lengths: list[int],
    device: torch.device,
    place: Zigzag = WHOLE,
    shared: SharedColumns | None = None,
) -> PackedSequences:
    """The description of sequences of these lengths laid end to end, in order.

    Args:
        place: which of their positions this rank holds.
        shared: which of the tokens the model is fed, and in the place of which others; not where
            ranks hold parts.
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
            pad_sequence([place.positions(lengths[i]) for i in members], batch_first=True)
            for members in groups
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
    """[b, s] int64 where the tokens of some of the sequences stand, and [b, s] bool which of these
    are not padding."""
    sizes = torch.tensor(lengths)
    starts, size = (sizes.cumsum(0) - sizes)[members][:, None], sizes[members][:, None]
    column = torch.arange(int(size.max()))
    return starts + torch.minimum(column, size - 1), column < size


def _alike(lengths: list[int]) -> list[list[int]]:
    """Numbers of the sequences in groups of like length, so that padding a group to its longest
    costs little."""
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
