"""Implements the operations of ops/vocab_parallel.py in plain PyTorch, on whole [N, V] tensors.
This implementation is the easiest to read.

The other implementations are tested against this module. Every implementation has the functions
`sums` and `gradient`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sums(
    logits: Tensor, local: Tensor, real: int, temperature: float, second_moment: bool
) -> Tensor:
    """Returns a tensor [4, N], or a tensor [6, N] if `second_moment` is True. The dtype is float64
    for float64 logits, and float32 for all other logits. The first four rows contain m, s, t and
    z_target for each token, computed from this rank's vocabulary columns. If there are six rows,
    the last two rows contain q and u for each token. The logit of the target token is z_target. The
    docstring of vocab_parallel.py contains the formulas of m, s, t, q and u.

    Args:
        logits: [N, V].
        local: [N] int64 column of the target; -1: another rank holds the target's column, and
            z_target is 0.
        real: number of columns that are not padding; if 0, m is -inf.
        temperature: divides z - m.
        second_moment: whether to return q and u.
    """
    z = _widened(logits[:, :real])
    m = z.amax(1) if real else z.new_full(local.shape, -torch.inf)
    d = (z - torch.where(m.isfinite(), m, 0.0)[:, None]) / temperature
    e = d.exp()
    picked = z.gather(1, local.clamp_min(0)[:, None]).squeeze(1) if real else torch.zeros_like(m)
    rows = [m, e.sum(1), _product(d, e).sum(1), torch.where(local >= 0, picked, 0.0)]
    if second_moment:
        rows += [(e * e).sum(1), _product(d, e * e).sum(1)]
    return torch.stack(rows)


def gradient(
    logits: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    m: Tensor,
    a: Tensor,
    b: Tensor | None,
    hit: Tensor,
    out: Tensor,
) -> None:
    """Writes the gradient into `out`, which may be the tensor of the logits. With d = (z - m) /
    temperature and e = exp(d), the gradient is e (a + b d). In the column of the target token,
    `hit` is added to the gradient.

    Args:
        m: [N], over all ranks.
        a, b: [N]. If b is None, b counts as 0.
        hit: [N].
    """
    d = (_widened(logits[:, :real]) - m[:, None]) / temperature
    e = d.exp()
    grad = e * a[:, None]
    if b is not None:
        grad += _product(d, e) * b[:, None]
    rows = (local >= 0).nonzero().squeeze(1)
    grad[rows, local[rows]] += hit[rows]
    out[:, real:] = 0.0
    out[:, :real] = grad.to(out.dtype)


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _product(d: Tensor, e: Tensor) -> Tensor:
    """Multiplies the tensors `d` and `e` element by element. If an element of `d` is -inf, the same
    element of `e` is 0, and the product is 0 instead of NaN."""
    return torch.where(e > 0, d * e, 0.0 * e)  # keeps a nan in e
