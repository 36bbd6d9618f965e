"""Sums over ranks that the loss of each of them goes through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce


def sum_over_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' `x`, on every rank. All must call it, and all or none take its gradient.

    Every rank's loss is its own part of a sum: with L = sum_r L_r and y = sum_r x_r the gradient in x_r is
    sum_q dL_q / dy, so the gradients are summed over the ranks as well.
    """
    return _SumOverRanks.apply(x, group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    all_reduce(total, group=group)
    return total
