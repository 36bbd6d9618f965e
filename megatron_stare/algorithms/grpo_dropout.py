"""GRPODropout drops right answers to a prompt, the most likely answer first, until the remaining
answers would no longer lower the entropy.

    s_i = mean surprisal of a response        K: all responses to the prompt with tokens
    while Cov_i(A_i [i in K], s_i) < 0: drop from K the response of lowest s_i among those of A > 0
    b = sum_K e^{-s_i} A_i / sum_K e^{-s_i}        A_i <- A_i - b in K, 0 outside K

The covariance covers all responses to the prompt, and a dropped response counts with advantage 0.
Tokens of dropped responses still count in N, the divisor of the loss. Two details are inferred,
because only a description of the method was available. The first inferred detail is that both sums
in the formula of b cover only the kept responses to one prompt. The second inferred detail is that
N counts the tokens of dropped responses as well as the tokens of kept responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, SegmentSum, Statistics, tensor
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "grpo_dropout/dropped",
        "share",
        "loss tokens in dropped responses",
        "below the share of right answers; all of them dropped: a prompt teaches nothing",
    ),
)


@dataclass(frozen=True, kw_only=True)
class GrpoDropout(Grpo):
    """Settings of GRPODropout: the settings of GRPO, with other defaults."""

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "GRPODropout drops responses by the surprisals of the log-prob pass"

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        number, ones = _groups(kept).shape[0], torch.ones_like(kept.advantage)
        return {
            f"grpo_dropout/{name}": SegmentSum(value, kept.sequence, number, kept.loss_mask)
            for name, value in (
                ("surprisal", kept.surprisal),
                ("advantage", kept.advantage),
                ("tokens", ones),
            )
        }

    def dropped(self, groups: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Returns the mask of the dropped responses, [B] bool, and the new advantages, [B]
        float64."""
        tokens = tensor(statistics, "grpo_dropout/tokens")
        surprisal = tensor(statistics, "grpo_dropout/surprisal") / tokens.clamp_min(1)
        advantage = tensor(statistics, "grpo_dropout/advantage") / tokens.clamp_min(1)
        present, right = tokens > 0, advantage > 0
        # by prompt, right answers first, the likeliest first; stable, so equal ones stay in order
        order = surprisal.argsort(stable=True)
        order = order[(~right[order]).to(torch.int8).argsort(stable=True)]
        order = order[groups[order].argsort(stable=True)]
        s, a, g = surprisal[order], advantage[order], groups[order]

        def whole(values: Tensor) -> Tensor:
            """Returns for each response the sum of `values` over all responses to its prompt."""
            zeros = torch.zeros(groups.shape[0] + 1, dtype=torch.float64, device=values.device)
            return zeros.index_add(0, g, values.to(torch.float64))[g]

        def before(values: Tensor) -> Tensor:
            """Returns one sum of `values` for each response. The sum covers the right answers to
            the same prompt that come before the response in `order`."""
            so_far = (values * right[order]).to(torch.float64).cumsum(0)
            earlier = torch.cat([so_far.new_zeros(1), so_far[:-1]])
            first = torch.searchsorted(g, g)  # of the prompt
            return earlier - earlier[first]

        number = whole(present[order]).clamp_min(1)
        mean = whole(s * present[order]) / number
        covariance = (whole(a * s) - before(a * s)) / number
        covariance = covariance - (whole(a) - before(a)) / number * mean
        # as long as no earlier drop sufficed; sums of rounded terms may miss 0 by a little
        sufficed = covariance >= -1e-12
        already = before(sufficed) > 0
        drop = right[order] & ~sufficed & ~already
        kept = present[order] & ~drop
        weight = (-s).exp() * kept
        baseline = whole(weight * a) / whole(weight).clamp_min(torch.finfo(torch.float64).tiny)
        new = torch.where(kept, a - baseline, 0.0)
        found, advantages = torch.zeros_like(right), torch.zeros_like(new)
        return found.index_put((order,), drop), advantages.index_put((order,), new)

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        dropped, advantages = self.dropped(_groups(batch), statistics)
        of_token = advantages[batch.sequence].to(batch.advantage.dtype)
        surrogate = self.surrogate(batch, of_token.detach())
        shares = {
            "loss/clip_fraction": surrogate.clipped,
            "grpo_dropout/dropped": dropped[batch.sequence].to(surrogate.loss.dtype),
        }
        return TokenTerms(loss=surrogate.loss, shares=shares)


def _groups(batch: TokenBatch) -> Tensor:
    """Returns the prompt group of every response, [B] int64."""
    assert batch.groups is not None
    return batch.groups
