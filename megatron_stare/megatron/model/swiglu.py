"""SwiGLU for the local layer spec. Megatron-core puts it together of operations that copy halves of the feed-forward
layer's hidden states, forward and backward; its fused one wants a compiler, and Transformer Engine brings its own.

Shape legend: F feed-forward size of this rank; *: any leading dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def swiglu(x: Tensor) -> Tensor:
    """silu(a) * b [*, F], of x = [a, b] [*, 2F] (N. Shazeer, arXiv 2002.05202)."""
    return _SwiGlu.apply(x)


class _SwiGlu(torch.autograd.Function):
    """Bit for bit what autograd makes of the formula; both halves of the gradient are written where they belong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        gate = nn.functional.silu(a)
        ctx.save_for_backward(x, gate)
        return gate * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        of_x = torch.empty_like(x)
        of_a, of_b = of_x.chunk(2, -1)
        torch.mul(grad, gate, out=of_b)
        torch.ops.aten.silu_backward.grad_input(grad * b, a, grad_input=of_a)
        return of_x
