"""Packs sequences end to end (thd) for Megatron's packed_seq_params and for this project's CPU
attention.

If several responses of a micro-batch share a prompt, the prompt passes through the model once. The
hidden states of a prompt do not depend on later tokens, so all responses to the prompt can use the
same hidden states. Only attention repeats the prompt's queries, keys and values for each response.

For attention on a CPU, `Spread` copies tokens into padded groups of sequences, and copies the
results back. In the backward pass, gradients take the opposite way. Each token's result was read
from one entry of the padded groups. In the backward pass, the result's gradient is copied to this
entry. The backward pass of attention then computes a gradient for every entry. The gradient of an
entry is copied to the token that the entry contains. If several entries contain the same token, the
gradients of these entries are summed. Plain tensor indexing is not used, because the backward pass
of tensor indexing adds gradients row by row to a tensor of zeros.

Shape legend: a micro-batch has t tokens. A group has b sequences, and its longest sequence has s
tokens. Under context parallelism with C ranks, each rank holds t / C tokens of the micro-batch, and
m = s / C tokens of the longest sequence in a group. A padded group of whole sequences is a tensor
[b, s, ...]. A padded group of one rank's tokens is a tensor [b, m, ...]. All padded groups together
have p entries (pairs of a sequence and a column), including entries for padding. The function
`shared_columns` uses the letter s for the length of a packed row. In the packed row, a copy of the
prompt precedes each response. The model receives only k columns of the packed row.
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

PADDING_LIMIT = 1.25  # limit on (tokens with padding) / tokens for a group of sequences


@dataclass(frozen=True)
class SharedColumns:
    """The columns of a packed row that are fed to the model.

    `fed`: [k] int64, the columns that are fed to the model, in ascending order.
    `stands`: [s] int64. The model has an output only for the columns in `fed`. Column i of the
        packed row uses the output for column `fed[stands[i]]`. If column i is in `fed`,
        `fed[stands[i]]` is i. If column i is not in `fed`, column i contains a prompt token that an
        earlier sample with the same prompt also contains. `fed[stands[i]]` is then the column of
        this prompt token in the first sample with the same prompt.
    """

    fed: Tensor
    stands: Tensor


def shared_columns(
    sample: Tensor, token: Tensor, prompts: Tensor, groups: Tensor, multiple: int
) -> SharedColumns:
    """Chooses which columns of a packed row are fed to the model.

    Args:
        sample: [s] int64 sample of each column; -1 for padding.
        token: [s] int64 index of each column's token in its sample.
        prompts: [samples] int64 prompt length of each sample.
        groups: [samples] int64; samples of one group share one prompt.
        multiple: divisor of the length of the row. The number of fed columns is also a multiple of
            `multiple`.
    """
    columns = torch.arange(len(sample))
    same = groups[:, None] == groups[None]
    first = same.int().argmax(dim=1)  # for every sample the first of its group
    ours = sample.clamp_min(0)
    in_prompt = (sample >= 0) & (token < prompts[ours])
    starts = torch.full((len(prompts),), len(sample)).scatter_reduce_(
        0, ours[sample >= 0], columns[sample >= 0], "amin"
    )
    source = torch.where(in_prompt, starts[first[ours]] + token, columns)
    copies = (source != columns).nonzero().squeeze(1)
    kept = copies[len(copies) - len(copies) % multiple :]  # copies fed too, to reach the multiple
    source[kept] = kept
    fed = (source == columns).nonzero().squeeze(1)
    place = torch.empty_like(columns)
    place[fed] = torch.arange(len(fed))
    return SharedColumns(fed, place[source])


@dataclass(frozen=True)
class Spread:
    """Mapping between the tokens of a packed row and padded groups of sequences. `spread` copies
    values from the tokens into the groups, and `collect` copies values from the groups back to the
    tokens. All groups together have p entries. The entries have the numbers 0 to p - 1, in the
    order in which the flattened groups are concatenated.

    `index`: [p] int64. For each entry of the padded groups, the index of the token that `spread`
        copies to this entry.
    `inverse`: [t] int64. For each token, the number of the entry from which `collect` reads the
        token's value. `spread` can copy a token to several entries, but `collect` reads only one of
        these entries.
    `shapes`: for every group, the number b of its sequences and the length s of its longest
        sequence.
    `repeated`: true if responses share a prompt. The backward pass must then sum the gradients of
        all copies of a prompt token. The padding of the groups also consists of copies of tokens.
        The backward pass does not need to sum the gradients of these copies, because these
        gradients are always 0. `repeated` is therefore false if only the padding contains copies.
    """

    index: Tensor
    inverse: Tensor
    shapes: tuple[tuple[int, int], ...]
    repeated: bool = False

    def each(self, change: Callable[[Tensor], Tensor]) -> Spread:
        """Returns a copy in which `change` was applied to each tensor, e.g. to move or pin the
        tensor."""
        return replace(self, index=change(self.index), inverse=change(self.inverse))

    def spread(self, tokens: Tensor, *, collected: bool = False) -> list[Tensor]:
        """Copies the values `tokens` [t, ...] into padded groups of sequences, and returns one
        tensor [b, s, ...] for every group.

        Args:
            collected: if true, the gradient of a token is the gradient of a single entry, which
                `inverse` gives, and not the sum over all copies of the token. Use true for queries,
                because `collect` reads the attention output only at this entry.
        """
        sums = self.repeated and not collected
        places = _Spread.apply(tokens, self.index, None if sums else self.inverse)
        parts = places.split([b * s for b, s in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def collect(self, places: Tensor) -> Tensor:
        """Reads one value for each token from padded groups of sequences, and returns these values
        as a tensor [t, ...]. `inverse` gives the entry from which a token's value is read.

        Args:
            places: [p, ...] values at all entries of the padded groups, flattened and concatenated.
        """
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
        # sums over the copies of a token, in their order: torch's kernel for embeddings
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
    """Extends Megatron's PackedSeqParams with fields for attention on a CPU. Attention on a CPU
    copies tokens into padded groups of sequences, and the new fields describe these copies.

    If `cu_seqlens_q` is None, rotary embeddings use the position of each token
    (megatron/model/model.py). Megatron's unfused rotary embedding for packed sequences is avoided,
    because that code splits the tokens into sequences and waits for the device in every layer.

    `queries`: the mapping between this rank's tokens and the padded groups. Padding repeats a
        sequence's last token.
    `keys`, `positions`: set only under context parallelism, because a rank's queries then need the
        keys of all ranks.
    """

    queries: Spread | None = None
    keys: Spread | None = None  # tokens of all ranks, concatenated in rank order
    # [t] int64, each token's position in its sequence; for latent attention
    tokens: Tensor | None = None
    # each [b, m] int64 on the host: positions of a group's queries in their sequences
    positions: tuple[Tensor, ...] = ()

    def pinned(self) -> PackedSequences:
        """Pins the tensors in host memory, for asynchronous copies to a GPU."""
        return self._each(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, *, bounds: bool) -> PackedSequences:
        """Copies the tensors to a device.

        Args:
            bounds: if true, include cu_seqlens, which Transformer Engine's kernels read on the
                device.
        """
        other = self._each(lambda tensor: tensor.to(device, non_blocking=True))
        if not bounds:
            other.cu_seqlens_q = other.cu_seqlens_kv = None
        return other

    def _each(self, change: Callable[[Tensor], Tensor]) -> PackedSequences:
        """Returns a copy in which `change` was applied to the tensors."""
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
    """Builds the PackedSequences that attention needs for a packed row. The row contains the
    sequences end to end, in the order of `lengths`.

    Args:
        place: the positions that this rank holds.
        shared: the columns to feed to the model if samples share prompts. Must be None under
            context parallelism.
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
    """Builds the Spread that puts sequences of the given `lengths` into the given `groups`.

    Args:
        order: [t] int64 column of each token; None: the tokens are in order.
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
    """Returns two tensors for a padded group of the sequences `members`. Both tensors have one row
    for each sequence of the group. The first tensor, [b, s] int64, contains the index of each
    token's column in the packed row. The second tensor, [b, s] bool, is True at tokens and False at
    padding. In the first tensor, the padding at the end of a row repeats the index of the last
    token in the same row."""
    sizes = torch.tensor(lengths)
    starts, size = (sizes.cumsum(0) - sizes)[members][:, None], sizes[members][:, None]
    column = torch.arange(int(size.max()))
    return starts + torch.minimum(column, size - 1), column < size


def _alike(lengths: list[int]) -> list[list[int]]:
    """Groups sequences of similar length, so that padding to the longest sequence of a group costs
    little. Returns, for each group, the indices of its sequences."""
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
