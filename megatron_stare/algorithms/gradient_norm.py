"""The norm of a step's gradient with respect to the logits, and STAPO's bounds on the norm (arXiv
2602.15620).

Let w be the derivative of the objective with respect to the log-prob of a sampled token. Let
one_hot(a) be the one-hot vector of the sampled token, and let p be the vector of all vocabulary
probabilities. The gradient with respect to the logits at the token's position is w (one_hot(a) -
p). Let p_a be the probability of the sampled token. For a vocabulary of V entries, the squared norm
of the gradient has these bounds:

    |grad|^2 = w^2 (1 - 2 p_a + sum_v p_v^2)
    w^2 (1 - 2 p_a + e^-H)  <=  |grad|^2  <=  w^2 (2 - 2 p_a - C_V H^2)
    C_V = (V - 1) / (V ln^2 V)

H is the entropy of p in nats. The bounds hold because the sum of squared probabilities satisfies
e^-H <= sum_v p_v^2 <= 1 - C_V H^2. To compute the bounds, the probability p_a and the entropy H are
enough. The exact norm requires p_a and sum_v p_v^2. The module vocab_parallel.py computes the sum
of squared probabilities, sum_v p_v^2. Each logit belongs to exactly one token. The squared norm of
a step's gradient is therefore the sum of |grad|^2 over all tokens. At temperature T, the step's
gradient is taken with respect to the logits before their division by T, so the norm of the step's
gradient has a factor 1 / T.
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
# lower ends of the ranges of probability, and of entropy in nats; the first ranges start at 0
PROBABILITIES = (IMPROBABLE, 0.05, 0.5, 0.9)
ENTROPIES = (0.1, 0.5, 1.5)
CELLS = (len(PROBABILITIES) + 1) * (len(ENTROPIES) + 1)
"""Number of cells, one for each pair of a probability range and an entropy range. Cell n has
probability range n // 4 and entropy range n % 4."""

METRICS = (
    Metric(
        "gradient/logit_norm",
        "norm",
        "norm of the step's gradient in all logits, before backward through the model",
        "steady; no spikes",
    ),
    Metric(
        "gradient/logit_norm_low",
        "norm",
        "STAPO's lower bound of gradient/logit_norm",
        "below gradient/logit_norm",
    ),
    Metric(
        "gradient/logit_norm_high",
        "norm",
        "STAPO's upper bound of gradient/logit_norm",
        "above gradient/logit_norm",
    ),
    Metric(
        "gradient/improbable_tokens",
        "share",
        "loss tokens with positive advantage and probability below 0.002",
        "small; STAPO's candidates",
    ),
    Metric(
        "gradient/improbable_square",
        "share",
        "share of these improbable tokens in the sum of squares of the plain policy gradient",
        "many times gradient/improbable_tokens: a few tokens dominate the gradient",
    ),
    Metric(
        "gradient/token_norm_<n>",
        "norm",
        "mean |one_hot(a) - p| of the tokens in cell n = 4 x range of probability (below 0.002,"
        " 0.05, 0.5, 0.9, 1) + range of entropy (below 0.1, 0.5, 1.5 nats, above);"
        " every observability.measured_every steps",
        "at most sqrt(2 - 2 p), STAPO's figure: large if p is small, largest if entropy is small"
        " too; 0: no token",
    ),
    Metric(
        "gradient/token_share_<n>",
        "share",
        "loss tokens in cell n of gradient/token_norm_<n>",
        "most tokens in cell 16, of large p and small entropy",
    ),
)


def squared_norm(log_prob: Tensor, sum_p2: Tensor) -> Tensor:
    """Returns |one_hot(a) - p|^2 of every token, [N] float64."""
    return (1 - 2 * log_prob.double().exp() + sum_p2.double()).clamp_min(0)


def lower_bound(log_prob: Tensor, entropy: Tensor) -> Tensor:
    """Returns lower bounds of `squared_norm`, [N] float64. Each returned value is STAPO's lower
    bound of the squared norm, or 0 if STAPO's bound is negative."""
    return (1 - 2 * log_prob.double().exp() + (-entropy.double()).exp()).clamp_min(0)


def upper_bound(log_prob: Tensor, entropy: Tensor, vocabulary: int) -> Tensor:
    """Returns upper bounds of `squared_norm`, [N] float64. `vocabulary` is V, at least 2."""
    c = (vocabulary - 1) / (vocabulary * math.log(vocabulary) ** 2)
    return (2 - 2 * log_prob.double().exp() - c * entropy.double() ** 2).clamp_min(0)


def norm_requests(batch: TokenBatch, push: Tensor, vocabulary: int) -> Mapping[str, Request]:
    """Returns requests for the whole-batch statistics that `norm_metrics` reads.

    Args:
        batch: the tokens, with their `sum_p2`.
        push: [N] w, the derivative of the objective with respect to every token's log-prob.

    Raises:
        ValueError: the batch lacks the sums over the vocabulary.
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
    """Returns requests for the whole-batch statistics that `cell_metrics` reads. A cell combines a
    range of probability with a range of entropy. Each cell has two statistics: the number of tokens
    and the sum of the token norms.

    Raises:
        ValueError: the batch lacks the sums over the vocabulary.
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
    """Returns `gradient/token_norm_<n>` and `gradient/token_share_<n>`, 0-dim. The gradient norm of
    a token is defined as |one_hot(a) - p|, as in the STAPO paper's plot of these norms. This norm
    belongs to the gradient of the token's log-prob, not to the gradient of the objective, so the
    norm does not contain the factor w. The gradient is taken with respect to the scaled logits z /
    T, where z are the logits and T is the temperature."""
    tokens, norms = tensor(statistics, "norm/cell_tokens"), tensor(statistics, "norm/cell")
    means, shares = norms / tokens.clamp_min(1), tokens / tokens.sum().clamp_min(1)
    found = {f"gradient/token_norm_{n}": means[n] for n in range(CELLS)}
    return found | {f"gradient/token_share_{n}": shares[n] for n in range(CELLS)}


def _range_of(x: Tensor, ends: tuple[float, ...]) -> Tensor:
    """Returns a tensor [N] int64. For each element of x, the tensor contains the number of values
    in `ends` that are less than or equal to this element."""
    found = torch.zeros_like(x, dtype=torch.int64)
    for end in ends:
        found += x >= end
    return found


def norm_metrics(statistics: Statistics, temperature: float) -> dict[str, Tensor]:
    """Returns the 0-dim metrics `gradient/*`. If there are no tokens, the shares
    `gradient/improbable_tokens` and `gradient/improbable_square` are 0."""
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
