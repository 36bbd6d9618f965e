"""Defines which positions of a sequence a context-parallel rank holds. Each rank holds two chunks,
one from each half of the sequence, as Megatron's rotary embeddings and Transformer Engine's
attention expect.

Shape legend: a sequence has L positions, sequences laid end to end have t positions in total, and
there are C context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Zigzag:
    """Splits sequences over the context-parallel ranks, so that all ranks have equal work in causal
    attention.

    Each sequence is cut into 2 C equal chunks, where C is the number of context-parallel ranks.
    Rank r holds chunks r and 2 C - 1 - r.

    Raises:
        ValueError: a method got a length that is not a multiple of 2 C. If C is 1, every length is
            allowed.
    """

    rank: int = 0
    ranks: int = 1

    @property
    def multiple(self) -> int:
        """Number by which every sequence length must be divisible: 1 for a single context-parallel
        rank, otherwise twice the number C of context-parallel ranks."""
        return 2 * self.ranks if self.ranks > 1 else 1

    def positions(self, length: int) -> Tensor:
        """Returns an int64 tensor [L / C] of the positions that this rank holds, in ascending
        order. `length` is L, the number of positions of the sequence."""
        if length % self.multiple:
            raise ValueError(f"{length} positions cannot be cut into {self.multiple} equal chunks")
        if self.ranks == 1:
            return torch.arange(length)
        chunk = length // self.multiple
        first = torch.arange(self.rank * chunk, (self.rank + 1) * chunk)
        return torch.cat([first, first + (self.multiple - 1 - 2 * self.rank) * chunk])

    def columns(self, lengths: Sequence[int]) -> Tensor:
        """Returns the indices of this rank's columns in a packed row, as an int64 tensor [t / C]. A
        packed row of t columns consists of several sequences, laid end to end. `lengths` contains
        the lengths of the sequences."""
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        return torch.cat(
            [start + self.positions(length) for start, length in zip(starts, lengths, strict=False)]
        )

    def order(self, lengths: Sequence[int]) -> Tensor:
        """Returns a permutation of the t columns of a packed row, as an int64 tensor [t]. Each
        context-parallel rank holds a part of the columns. Concatenating the parts of all ranks in
        rank order gives a tensor with the same columns in another order. Entry i of the
        permutation says where this tensor has column i of the packed row. To restore the packed
        row, index the tensor with the permutation."""
        return torch.cat(
            [Zigzag(rank, self.ranks).columns(lengths) for rank in range(self.ranks)]
        ).argsort()


WHOLE = Zigzag()
