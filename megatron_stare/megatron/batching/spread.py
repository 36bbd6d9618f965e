"""Tokens laid end to end as padded groups of sequences, and back, with backward passes that only copy.

Indexing would add every gradient into a tensor of zeros, row by row on a CPU; here it is known where each came from.
Shape legend: t tokens laid end to end, p places of all groups laid end to end, padding included; b sequences of a group
and s its longest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class Spread:
    """Which token stands at every place of padded groups.

    index: [p] int64, a token.
    inverse: [t] int64, a place of every token: the one that counts where it has several.
    shapes: (b, s) of every group.
    repeated: whether tokens stand at several places whose gradients are not 0 (prompts that responses share); padding,
        whose gradient is 0, repeats tokens as well and does not count.
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
            collected: a token's gradient comes from the place in `inverse` alone, as that of queries does, of whose
                outputs `collect` takes no other.
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
