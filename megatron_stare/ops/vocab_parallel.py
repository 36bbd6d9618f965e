"""Log-prob of the taken token and entropy of the distribution, over logits whose vocabulary is split over ranks.

Both come from one pass: temperature applied, padded vocabulary columns masked, float32 accumulation, one collective of
four numbers a token. With x = logits / temperature and m the row maximum,

    s = sum_v exp(x_v - m)      t = sum_v (x_v - m) exp(x_v - m)
    log p_y = x_y - m - ln s    H = ln s - t / s
    d log p_y / dx = 1[y] - p   dH / dx = -p (ln p + H)

The entropy sensitivity (algorithms/sensitivity.py) needs two sums more, in the same pass and the same collective:

    q = sum_v exp(x_v - m)^2    u = sum_v (x_v - m) exp(x_v - m)^2
    sum_v p_v^2 = q / s^2       sum_v p_v^2 ln p_v = (u - q ln s) / s^2

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
    second_moment: bool = False,
) -> tuple[Tensor, ...]:
    """Log-prob and entropy of every row.

    Args:
        logits: [N, V] this rank's columns; rank r of `group` holds columns r V to (r + 1) V.
        targets: [N] int64, columns of the whole vocabulary, below vocab_size.
        vocab_size: real columns; those at or above it are padding and have probability 0.
        temperature: divides the logits, above 0.
        group: tensor-parallel ranks; None: this rank holds every column.
        entropy_gradient: whether entropy carries gradient; without it entropy costs nothing in backward.
        second_moment: whether to give the sums of the entropy sensitivity too; they never carry gradient.

    Returns:
        log_prob [N] and entropy [N] in nats, float32 (float64 for float64 logits), equal on every rank of `group`; with
        `second_moment` also sum p^2 [N] and sum p^2 ln p [N] over the vocabulary.
    """
    return _LogProbAndEntropy.apply(logits, targets, vocab_size, temperature, group, entropy_gradient, second_moment)


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
        second_moment: bool,
    ) -> tuple[Tensor, ...]:
        columns = logits.shape[1]
        rank, ranks = (group.rank(), group.size()) if group is not None else (0, 1)
        start = rank * columns
        real = min(max(vocab_size - start, 0), columns)
        x = _scaled(logits, temperature, real)

        m = x.max(dim=1).values if columns else x.new_full(targets.shape, -torch.inf)
        m_finite = torch.where(m.isfinite(), m, 0.0)  # a rank may hold padding only
        e = (x - m_finite[:, None]).exp_()
        s = e.sum(1)
        xe = torch.where(e > 0, (x - m_finite[:, None]) * e, 0.0)
        t = xe.sum(1)
        # neither makes an [N, V] product
        squares = [torch.linalg.vector_norm(e, dim=1) ** 2, torch.linalg.vecdot(xe, e)] if second_moment else []
        local = targets - start
        here = (local >= 0) & (local < real)
        picked = x.gather(1, local.clamp(0, max(columns - 1, 0))[:, None]).squeeze(1)
        x_target = torch.where(here, picked, 0.0)

        m_all, s_all, t_all, x_target, *squares = _merge(
            m, m_finite, s, t, x_target, *squares, group=group, ranks=ranks
        )
        log_s = s_all.log()
        log_z = m_all + log_s
        log_prob = x_target - log_z
        entropy = log_s - t_all / s_all

        ctx.save_for_backward(logits, local, here, log_z, entropy)
        ctx.temperature, ctx.real, ctx.entropy_gradient = temperature, real, entropy_gradient
        moments: tuple[Tensor, ...] = ()
        if second_moment:
            q, u = squares
            moments = q / s_all**2, (u - q * log_s) / s_all**2
        ctx.mark_non_differentiable(*moments, *(() if entropy_gradient else (entropy,)))
        return log_prob, entropy, *moments

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, here, log_z, entropy = ctx.saved_tensors
        log_p = _scaled(logits, ctx.temperature, ctx.real) - log_z[:, None]
        p = log_p.exp()
        grad = p * -grad_log_prob[:, None]
        rows = here.nonzero().squeeze(1)
        grad[rows, local[rows]] += grad_log_prob[rows]
        if ctx.entropy_gradient:
            slope = torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
            grad -= slope * grad_entropy[:, None]
        return (grad / ctx.temperature).to(logits.dtype), None, None, None, None, None, None


def _scaled(logits: Tensor, temperature: float, real: int) -> Tensor:
    """[N, V] temperature applied in at least float32, padding at -inf."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if real < x.shape[1]:
        x[:, real:] = -torch.inf
    return x


def _merge(
    m: Tensor,
    m_finite: Tensor,
    s: Tensor,
    t: Tensor,
    x_target: Tensor,
    *squares: Tensor,
    group: ProcessGroup | None,
    ranks: int,
) -> tuple[Tensor, ...]:
    """Combines every rank's (m, s, t, x_target), and (q, u) where they are given, each [N], after one all-gather."""
    if ranks == 1:
        return m_finite, s, t, x_target, *squares
    packed = torch.stack([m, s, t, x_target, *squares])  # [4 or 6, N]
    parts = packed.new_empty(ranks, *packed.shape)
    all_gather_into_tensor(parts.view(-1), packed.view(-1), group=group)
    m_r, s_r, t_r, x_r, *squares_r = parts.unbind(1)  # each [R, N]
    m_all = m_r.max(0).values
    m_all = torch.where(m_all.isfinite(), m_all, 0.0)
    shift = torch.where(m_r.isfinite(), m_r - m_all, -torch.inf)
    scale = shift.exp()
    merged = [m_all, (scale * s_r).sum(0), _shifted(t_r, s_r, shift, scale), x_r.sum(0)]
    if squares_r:
        q_r, u_r = squares_r
        merged += [(scale**2 * q_r).sum(0), _shifted(u_r, q_r, shift, scale**2)]
    return tuple(merged)


def _shifted(t_r: Tensor, s_r: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """[N] sum (x - m_all) w over all ranks, with s_r = sum w and t_r = sum (x - m_r) w by rank, [R, N] each."""
    return torch.where(scale > 0, scale * (t_r + shift * s_r), 0.0).sum(0)
