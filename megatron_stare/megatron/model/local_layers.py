"""Operators of layers that run without Transformer Engine: RMSNorm, SwiGLU, and attention over
short sequences.

- RMSNorm computes the same function as megatron-core's torch norm, but supports sequence
  parallelism. On a CPU, our RMSNorm takes a third of the time of megatron-core's torch norm. The
  norm of megatron-core refuses sequence parallelism, because the norm's weight would miss the
  gradient all-reduce. Our RMSNorm requests the gradient all-reduce through an attribute of its
  weight. On GPUs, our RMSNorm calls torch's kernel for the norm and its gradient. On CPUs, torch's
  own norm takes a dozen operations, and each operation reads and writes the whole input.

- SwiGLU: Our SwiGLU copies neither half of the feed-forward hidden states. The SwiGLU operations of
  megatron-core copy both halves of the feed-forward hidden states in the forward pass and in the
  backward pass. The fused SwiGLU of megatron-core needs a compiler, but our SwiGLU does not. Layers
  of Transformer Engine do not use our SwiGLU.

- The attention over short sequences is for CPUs, and keeps all scores in memory. On CPUs, torch's
  own attention kernel runs small matrix products for every head of every sequence, in the forward
  pass and in the backward pass. For short sequences, the overhead of starting a small matrix
  product exceeds the time to compute the product. Our attention over short sequences runs one
  batched product for all heads and sequences.

Shape legend: H = hidden size; F = feed-forward size of this rank; b = sequences, s = positions, n =
heads, g = groups of heads that share keys and values, r = heads per group, d = head size; *: any
leading dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMS norm, y = weight * x / rms(x) over the last dimension, computed in at least float32."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(x, self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    """RMS norm with its gradient. The norm is y = w n, where n = x r and r = 1 / sqrt(mean(x^2) +
    eps). For a gradient g of y, the gradient of w is the sum of g n over all rows, and the gradient
    of x is r (g w - n mean(g w n)). (Source: Zhang and Sennrich, arXiv 1910.07467, equation 4.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divides each row of x [*, H] by the root of m + `eps`, and multiplies the result by
        `weight` [H]. The number m is the mean of the squares of the row's elements. The returned
        tensor has the shape and the dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        normed = wide * r
        ctx.save_for_backward(normed, r, weight)
        return (normed * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, r, weight = ctx.saved_tensors
        hidden, wide, weights = weight.numel(), grad.to(normed.dtype), weight.to(normed.dtype)
        of_weight = wide * normed
        mean = (of_weight.reshape(-1, hidden) @ weights).div_(hidden).view(r.shape)
        of_x = torch.addcmul(wide * weights, normed, mean, value=-1).mul_(r)
        return of_x.to(grad.dtype), of_weight.reshape(-1, hidden).sum(0).to(weight.dtype), None


def swiglu(x: Tensor) -> Tensor:
    """Splits the last dimension of x into two halves a and b, and returns the elementwise product
    of silu(a) and b (Shazeer, arXiv 2002.05202). The shape of x is [*, 2F], and the shape of the
    result is [*, F]."""
    return _SwiGlu.apply(x)


class SwiGlu(MegatronModule):
    """Wraps `swiglu` in a module that Megatron can use as activation. The module adds nothing to a
    checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)


class _SwiGlu(torch.autograd.Function):
    """Computes `swiglu` and its gradient. The gradient of x is bit-identical to the gradient that
    autograd would compute from the formula. Autograd would first compute the gradients of the two
    halves of x as separate tensors. This class allocates one tensor for the gradient of x, and
    writes the gradient of each half of x directly into the same half of this tensor."""

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


def short_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention: query [b, s, n, d], key and value [b, s, g, d] -> [b, s, n, d].

    Args:
        scale: factor of the attention scores, or None for 1 / sqrt(d).
    """
    return _ShortAttention.apply(
        query, key, value, query.shape[-1] ** -0.5 if scale is None else scale
    )


class _ShortAttention(torch.autograd.Function):
    """Attention with its gradient: S = scale * Q K^T, P = softmax(S) and O = P V (Vaswani et al.,
    arXiv 1706.03762, equation 1). Let dX be the gradient of the loss with respect to the matrix X:

        dV = P^T dO
        dP = dO V^T
        dS = P * (dP - rowsum(P * dP))    with elementwise products *
        dQ = scale * dS K
        dK = scale * dS^T Q
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups, heads = key.shape[2], query.shape[2]
        rows, keys = _rows(query, groups), _rows(key, groups)
        # contiguous: a view would keep the joint query-key-value projection in memory
        values = _rows(value, groups).contiguous()
        length = query.shape[1]
        later = torch.full((length, length), -torch.inf, dtype=query.dtype).triu_(1)
        later = later.repeat(heads // groups, 1).expand(rows.shape[0], -1, -1)
        # attention probabilities [b g, r s, s]
        chances = torch.baddbmm(later, rows, keys.transpose(1, 2), alpha=scale).softmax(-1)
        ctx.save_for_backward(rows, keys, values, chances)
        ctx.scale, ctx.groups, ctx.heads = scale, groups, heads
        return _heads(torch.bmm(chances, values), groups, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, keys, values, chances = ctx.saved_tensors
        groups, heads = ctx.groups, ctx.heads
        out = _rows(grad, groups)
        of_values = torch.bmm(chances.transpose(1, 2), out)
        of_chances = torch.bmm(out, values.transpose(1, 2))
        of_scores = torch._softmax_backward_data(of_chances, chances, -1, chances.dtype)
        of_scores.mul_(ctx.scale)
        of_rows, of_keys = torch.bmm(of_scores, keys), torch.bmm(of_scores.transpose(1, 2), rows)
        return (
            _heads(of_rows, groups, heads),
            _heads(of_keys, groups, groups),
            _heads(of_values, groups, groups),
            None,
        )


def _rows(x: Tensor, groups: int) -> Tensor:
    """Stacks the rows of all heads that share keys and values: [b, s, n, d] -> [b g, r s, d]."""
    b, s, n, d = x.shape
    return (
        x.reshape(b, s, groups, n // groups, d)
        .permute(0, 2, 3, 1, 4)
        .reshape(b * groups, n // groups * s, d)
    )


def _heads(rows: Tensor, groups: int, heads: int) -> Tensor:
    """Undoes `_rows`: [b g, r s, d] -> [b, s, n, d]."""
    many, tall, d = rows.shape
    s = tall // (heads // groups)
    return (
        rows.view(many // groups, groups, heads // groups, s, d)
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, s, heads, d)
    )
