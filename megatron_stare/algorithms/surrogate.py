"""Surrogate losses of the policy gradient. The function `clip` clips the ratio of a token or of a
response. The function `weighted_likelihood` computes CISPO's weighted likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.records.batch import TokenBatch

LOG_RATIO_LIMIT = 20.0  # a larger exponent would overflow bf16 sums; verl's bound


@dataclass(frozen=True)
class Surrogate:
    """Result of a surrogate loss. The tensor `loss` [N] is -J, where J is the objective. The tensor
    `clipped` [N] bool is True for a token if clipping changed the objective of the token."""

    loss: Tensor
    clipped: Tensor


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None,
) -> Surrogate:
    """Returns the loss -J with J = min(r A, clip(r, 1 - low, 1 + high) A) and r = p / p_old. If a
    token's advantage A is negative, the dual clip keeps the objective J at or above dual * A.

    Sources: PPO (arXiv 1707.06347); for separate bounds, DAPO (arXiv 2503.14476); for the dual
    clip, arXiv 1912.09729.

    Args:
        log_prob: [N] with gradient.
        old_log_prob: [N] detached.
        advantage: [N] detached.
        low: lower clip distance.
        high: upper clip distance.
        dual: the dual clip, above 1. None turns the dual clip off.
    """
    return clip(ratio(log_prob, old_log_prob), advantage, low=low, high=high, dual=dual)


def ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """[N] p / p_old."""
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clip(
    ratio: Tensor, advantage: Tensor, *, low: float, high: float, dual: float | None
) -> Surrogate:
    """Returns the clipped surrogate loss, [N], for given importance ratios. `ratio` [N] contains
    one importance ratio for each token: the ratio of the token itself, or the ratio of the token's
    response."""
    free = ratio * advantage
    bounded = ratio.clamp(1 - low, 1 + high) * advantage
    objective = torch.minimum(free, bounded)
    clipped = bounded < free
    if dual is not None:
        floor = dual * advantage
        below = (advantage < 0) & (objective < floor)
        objective = torch.where(below, floor, objective)
        clipped = clipped | below
    return Surrogate(loss=-objective, clipped=clipped)


def weighted_likelihood(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, low: float, high: float
) -> Surrogate:
    """Returns CISPO's loss -J (arXiv 2506.13585) with J = sg[clip(r, 1 - low, 1 + high)] A ln p.
    Every token keeps its gradient. `clipped` marks the tokens whose ratio r was clipped. If `low`
    is 1, the lower bound is 0, so only the upper bound can clip a ratio."""
    weight = bounded_ratio(log_prob, old_log_prob, low=low, high=high)
    clipped = weight != ratio(log_prob, old_log_prob).detach()
    return Surrogate(loss=-weight * advantage * log_prob, clipped=clipped)


def bounded_ratio(log_prob: Tensor, old_log_prob: Tensor, *, low: float, high: float) -> Tensor:
    """Returns the detached, clipped ratio sg[clip(r, 1 - low, 1 + high)], [N]."""
    return ratio(log_prob, old_log_prob).detach().clamp(1 - low, 1 + high)


def response_mean(x: Tensor, batch: TokenBatch) -> Tensor:
    """Returns for each token the mean of x over the loss-mask tokens of the token's response, [N].
    The mean is differentiable.

    If the tokens of a response are spread over several ranks, `batch.over_ranks` must sum over all
    of these ranks. Without this sum, the returned mean would cover only a part of the response. A
    subclass of Method that calls `response_mean` must set the attribute `coupling` to 'sequence'.
    """
    if batch.sequence_lengths is None:
        raise ValueError("a mean by response needs sequence_lengths")
    zeros = torch.zeros(batch.sequence_lengths.shape[0], dtype=x.dtype, device=x.device)
    total = zeros.index_add(0, batch.sequence, torch.where(batch.loss_mask, x, 0.0))
    count = zeros.index_add(0, batch.sequence, batch.loss_mask.to(x.dtype))
    if batch.over_ranks is not None:
        total, count = batch.over_ranks(torch.stack([total, count]))
    return (total / count.clamp_min(1))[batch.sequence]
