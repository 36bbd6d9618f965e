"""The norm of a step's gradient in the logits, and STAPO's bounds of it (arXiv 2602.15620).

A token a whose log-prob the objective has slope w in pulls the logits of its position by w
(one_hot(a) - p), and

    |grad|^2 = w^2 (1 - 2 p_a + sum_v p_v^2)
    w^2 (1 - 2 p_a + e^-H)  <=  |grad|^2  <=  w^2 (2 - 2 p_a - C_V H^2)
    C_V = (V - 1) / (V ln^2 V)

for V entries of the vocabulary: e^-H <= sum p^2 <= 1 - C_V H^2. The bounds need p and H alone; the
sum of squares is at hand here (vocab_parallel.py), so the norm itself is too. Every token has
logits of its own, so squares add up over tokens. At temperature T the logits are those before the
division, and every norm carries 1 / T.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Count,
    Request,
    SegmentSum,
    Statistics,
    Sum,
    scalar,
    tensor,
)
from megatron_stare.records.metric import Metric

IMPROBABLE = 0.002  # tau_p of STAPO
# lower ends of the ranges of a token's probability, and of its position's entropy in nats; the
# first range of each begins at 0
PROBABILITIES = (IMPROBABLE, 0.05, 0.5, 0.9)
ENTROPIES = (0.1, 0.5, 1.5)
CELLS = (len(PROBABILITIES) + 1) * (len(ENTROPIES) + 1)
"""Ranges of probability times ranges of entropy, entropy fastest: cell n is probability n // 4,
entropy n % 4."""

METRICS = (
    Metric(
        "gradient/logit_norm",
        "norm",
        "of the step's gradient in all logits, before the model",
        "steady; no spikes",
    ),
    Metric(
        "gradient/logit_norm_low", "norm", "STAPO's lower bound of it", "below gradient/logit_norm"
    ),
    Metric(
        "gradient/logit_norm_high", "norm", "STAPO's upper bound of it", "above gradient/logit_norm"
    ),
    Metric(
        "gradient/improbable_tokens",
        "share",
        "tokens of positive advantage and a probability below 0.002, of all that carry loss",
        "small; STAPO's candidates",
    ),
    Metric(
        "gradient/improbable_square",
        "share",
        "of them in the sum of squares of the plain policy gradient",
        "many times gradient/improbable_tokens: few tokens pull far more than their share",
    ),
    Metric(
        "gradient/token_norm_<n>",
        "norm",
        "mean |one_hot(a) - p| of the tokens in cell n of probability (below 0.002, 0.05, 0.5, 0.9,"
        " 1) and entropy (below 0.1, 0.5, 1.5 nats, above), n = 4 x that of probability + that of"
        " entropy; every observability.measured_every steps",
        "within sqrt(2 - 2 p), STAPO's figure: large where p is small, largest where entropy is"
        " too; 0: no token",
    ),
    Metric(
        "gradient/token_share_<n>",
        "share",
        "of the tokens that carry loss in cell n of gradient/token_norm_<n>",
        "most in the cell of large p and small entropy, 16",
    ),
)


def squared_norm(log_prob: Tensor, sum_p2: Tensor) -> Tensor:
    """[N] float64 |one_hot(a) - p|^2."""
    return (1 - 2 * log_prob.double().exp() + sum_p2.double()).clamp_min(0)


def lower_bound(log_prob: Tensor, entropy: Tensor) -> Tensor:
    """[N] float64, at most `squared_norm`; the paper's, and 0 where that is negative."""
    return (1 - 2 * log_prob.double().exp() + (-entropy.double()).exp()).clamp_min(0)


def upper_bound(log_prob: Tensor, entropy: Tensor, vocabulary: int) -> Tensor:
    """[N] float64, at least `squared_norm`. `vocabulary` is V, at least 2."""
    c = (vocabulary - 1) / (vocabulary * math.log(vocabulary) ** 2)
    return (2 - 2 * log_prob.double().exp() - c * entropy.double() ** 2).clamp_min(0)


def norm_requests(batch: TokenBatch, push: Tensor, vocabulary: int) -> Mapping[str, Request]:
    """Statistics of the whole batch that `norm_metrics` reads.

    Args:
        batch: with sum_p2.
        push: [N] w, slope of the objective in every token's log-prob.

    Raises:
        ValueError: the batch is without the sums over the vocabulary.
    """
    if batch.sum_p2 is None:
        raise ValueError("the norm of the gradient needs sum_p2 of every token")
    log_prob, square = batch.old_log_prob.detach(), push.double() ** 2
    exact = squared_norm(log_prob, batch.sum_p2)
    plain = batch.advantage.double() ** 2 * exact
    improbable = batch.loss_mask & (batch.advantage > 0) & (log_prob.exp() < IMPROBABLE)
    return {
        "norm/square": Sum(square * exact, batch.loss_mask),
        "norm/low": Sum(square * lower_bound(log_prob, batch.entropy), batch.loss_mask),
        "norm/high": Sum(
            square * upper_bound(log_prob, batch.entropy, vocabulary), batch.loss_mask
        ),
        "norm/plain": Sum(plain, batch.loss_mask),
        "norm/plain_improbable": Sum(plain, improbable),
        "norm/tokens": Count(batch.loss_mask),
        "norm/improbable": Count(improbable),
    }


def cell_requests(batch: TokenBatch) -> Mapping[str, Request]:
    """Statistics of the whole batch that `cell_metrics` reads: the tokens of every cell and the sum
    of their norms.

    Raises:
        ValueError: the batch is without the sums over the vocabulary.
    """
    if batch.sum_p2 is None:
        raise ValueError("the norm of a token's gradient needs its sum_p2")
    log_prob, entropy = batch.old_log_prob.detach().double(), batch.entropy.double()
    columns = len(ENTROPIES) + 1
    cell = columns * _range_of(log_prob.exp(), PROBABILITIES) + _range_of(entropy, ENTROPIES)
    norm = squared_norm(log_prob, batch.sum_p2).sqrt()
    return {
        "norm/cell": SegmentSum(norm, cell, CELLS, batch.loss_mask),
        "norm/cell_tokens": SegmentSum(torch.ones_like(norm), cell, CELLS, batch.loss_mask),
    }


def cell_metrics(statistics: Statistics) -> dict[str, Tensor]:
    """`gradient/token_norm_<n>` and `gradient/token_share_<n>`, 0-dim. The norm is that of a
    token's own log-prob in the logits over the temperature, before any weight: STAPO's figure."""
    tokens, norms = tensor(statistics, "norm/cell_tokens"), tensor(statistics, "norm/cell")
    means, shares = norms / tokens.clamp_min(1), tokens / tokens.sum().clamp_min(1)
    found = {f"gradient/token_norm_{n}": means[n] for n in range(CELLS)}
    return found | {f"gradient/token_share_{n}": shares[n] for n in range(CELLS)}


def _range_of(x: Tensor, ends: tuple[float, ...]) -> Tensor:
    """[N] int64, how many of the `ends` are at most x."""
    found = torch.zeros_like(x, dtype=torch.int64)
    for end in ends:
        found += x >= end
    return found


def norm_metrics(statistics: Statistics, temperature: float) -> dict[str, Tensor]:
    """The `gradient/*` metrics, 0-dim; shares of nothing are 0."""
    tokens, plain = scalar(statistics, "norm/tokens"), scalar(statistics, "norm/plain")
    return {
        "gradient/logit_norm": scalar(statistics, "norm/square").sqrt() / temperature,
        "gradient/logit_norm_low": scalar(statistics, "norm/low").sqrt() / temperature,
        "gradient/logit_norm_high": scalar(statistics, "norm/high").sqrt() / temperature,
        "gradient/improbable_tokens": scalar(statistics, "norm/improbable") / tokens.clamp_min(1),
        "gradient/improbable_square": (
            scalar(statistics, "norm/plain_improbable") / plain.clamp_min(1e-300)
        ),
    }
