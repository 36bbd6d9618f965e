"""Causal attention over short sequences on a CPU, with the scores held whole.

torch's kernel for CPUs starts small matrix products for every head of every sequence, forward and backward; for short
sequences that costs more than the products. Here each is one batched product over all of them.

Shape legend: b sequences, s positions, n heads, g groups of heads that share keys and values, r heads of a group,
d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def short_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """query [b, s, n, d], key and value [b, s, g, d] -> [b, s, n, d], each position seeing itself and what is before.

    Args:
        scale: of the scores; None: 1 / sqrt(d).
    """
    return _ShortAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)


class _ShortAttention(torch.autograd.Function):
    """With P = softmax(scale Q K') and O = P V, for a gradient G of O: that of V is P'G; with D = G V' that of the
    scores is S = P (D - sum(D P)), of Q scale S K, of K scale S'Q. (A. Vaswani et al., arXiv 1706.03762, eq. 1.)"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        groups, heads = key.shape[2], query.shape[2]
        rows, keys = _rows(query, groups), _rows(key, groups)
        values = _rows(value, groups).contiguous()  # a view would keep the product of all three projections
        length = query.shape[1]
        later = torch.full((length, length), -torch.inf, dtype=query.dtype).triu_(1)
        later = later.repeat(heads // groups, 1).expand(rows.shape[0], -1, -1)
        chances = torch.baddbmm(later, rows, keys.transpose(1, 2), alpha=scale).softmax(-1)  # [b g, r s, s]
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
        of_scores = torch._softmax_backward_data(of_chances, chances, -1, chances.dtype).mul_(ctx.scale)
        of_rows, of_keys = torch.bmm(of_scores, keys), torch.bmm(of_scores.transpose(1, 2), rows)
        return _heads(of_rows, groups, heads), _heads(of_keys, groups, groups), _heads(of_values, groups, groups), None


def _rows(x: Tensor, groups: int) -> Tensor:
    """[b, s, n, d] -> [b g, r s, d]: what is to meet the same keys, one below the other."""
    b, s, n, d = x.shape
    return x.reshape(b, s, groups, n // groups, d).permute(0, 2, 3, 1, 4).reshape(b * groups, n // groups * s, d)


def _heads(rows: Tensor, groups: int, heads: int) -> Tensor:
    """[b g, r s, d] -> [b, s, n, d]: undoes `_rows`."""
    many, tall, d = rows.shape
    s = tall // (heads // groups)
    return rows.view(many // groups, groups, heads // groups, s, d).permute(0, 3, 1, 2, 4).reshape(-1, s, heads, d)
