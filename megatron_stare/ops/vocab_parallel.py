"""Log-prob of the taken token and entropy of the distribution, over logits whose vocabulary is split over ranks.

Both come from one pass: temperature applied, padded vocabulary columns masked, float32 accumulation, one collective of
four numbers a token. With x = logits / temperature and m the row maximum,

    s = sum_v exp(x_v - m)      t = sum_v (x_v - m) exp(x_v - m)
    log p_y = x_y - m - ln s    H = ln s - t / s
    d log p_y / dx = 1[y] - p   dH / dx = -p (ln p + H)

Shape legend: N tokens, V vocabulary columns of this rank, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_into_tensor


def log_prob_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    group: ProcessGroup | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every row.

    Args:
        logits: [N, V] this rank's columns; rank r of `group` holds columns r V to (r + 1) V.
        targets: [N] int64, columns of the whole vocabulary, below vocab_size.
        vocab_size: real columns; those at or above it are padding and have probability 0.
        temperature: divides the logits, above 0.
        group: tensor-parallel ranks; None: this rank holds every column.
        entropy_gradient: whether entropy carries gradient; without it entropy costs nothing in backward.

    Returns:
        log_prob [N] and entropy [N] in nats, float32 (float64 for float64 logits), equal on every rank of `group`.
    """
    log_prob, entropy = _LogProbAndEntropy.apply(logits, targets, vocab_size, temperature, group, entropy_gradient)
    return log_prob, entropy


class _LogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_size: int,
        temperature: float,
        group: ProcessGroup | None,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        columns = logits.shape[1]
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        start = rank * columns
        real = min(max(vocab_size - start, 0), columns)
        x = _scaled(logits, temperature, real)

        m = x.max(dim=1).values if columns else x.new_full(targets.shape, -torch.inf)
        m_finite = torch.where(m.isfinite(), m, 0.0)  # a rank may hold padding only
        e = (x - m_finite[:, None]).exp_()
        s = e.sum(1)
        t = torch.where(e > 0, (x - m_finite[:, None]) * e, 0.0).sum(1)
        local = targets - start
        here = (local >= 0) & (local < real)
        picked = x.gather(1, local.clamp(0, max(columns - 1, 0))[:, None]).squeeze(1)
        x_target = torch.where(here, picked, 0.0)

        m_all, s_all, t_all, x_target = _merge(m, m_finite, s, t, x_target, group, ranks)
        log_s = s_all.log()
        log_z = m_all + log_s
        log_prob = x_target - log_z
        entropy = log_s - t_all / s_all

        ctx.save_for_backward(logits, local, here, log_z, entropy)
        ctx.temperature, ctx.real, ctx.entropy_gradient = temperature, real, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, here, log_z, entropy = ctx.saved_tensors
        log_p = _scaled(logits, ctx.temperature, ctx.real) - log_z[:, None]
        p = log_p.exp()
        grad = p * -grad_log_prob[:, None]
        rows = here.nonzero().squeeze(1)
        grad[rows, local[rows]] += grad_log_prob[rows]
        if ctx.entropy_gradient:
            slope = torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
            grad -= slope * grad_entropy[:, None]
        return (grad / ctx.temperature).to(logits.dtype), None, None, None, None, None


def _scaled(logits: Tensor, temperature: float, real: int) -> Tensor:
    """[N, V] temperature applied in at least float32, padding at -inf."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if real < x.shape[1]:
        x[:, real:] = -torch.inf
    return x


def _merge(
    m: Tensor, m_finite: Tensor, s: Tensor, t: Tensor, x_target: Tensor, group: ProcessGroup | None, ranks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combines every rank's (m, s, t, x_target), each [N], after one all-gather."""
    if ranks == 1:
        return m_finite, s, t, x_target
    packed = torch.stack([m, s, t, x_target])  # [4, N]
    parts = packed.new_empty(ranks, *packed.shape)
    all_gather_into_tensor(parts.view(-1), packed.view(-1), group=group)
    m_r, s_r, t_r, x_r = parts.unbind(1)  # each [R, N]
    m_all = m_r.max(0).values
    m_all = torch.where(m_all.isfinite(), m_all, 0.0)
    shift = torch.where(m_r.isfinite(), m_r - m_all, -torch.inf)
    scale = shift.exp()
    # sum (x - m_all) e^(x - m_all) = e^shift (t_r + shift s_r)
    t_all = torch.where(scale > 0, scale * (t_r + shift * s_r), 0.0).sum(0)
    return m_all, (scale * s_r).sum(0), t_all, x_r.sum(0)
