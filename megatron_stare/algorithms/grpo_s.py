"""GRPO-S (arXiv 2508.04349) applies GTPO's idea to whole responses: the reward of a response grows
with the mean entropy of the response.

Let E be the mean entropy of a response under the old policy. Let n and m be the numbers of correct
and wrong responses to the prompt. In the formula for the reward r of a correct response, the sum
covers all correct responses to the prompt. In the formula for the reward r of a wrong response, the
sum covers all wrong responses to the prompt.

    correct   r = beta1 + beta2 n E / sum E
    wrong     r = -beta1 - beta2 m (1 / E) / sum (1 / E)
    A = (r - mean) / std over the prompt group
    J = mean_i min(w A, clip(w) A),        w_i = mean_t rho_{i,t}

The importance ratio w_i of response i is the arithmetic mean of the token ratios rho_{i,t} over the
tokens t of the response (eq. 11 of the paper). With the setting `ratio: geometric`, w_i is the
geometric mean of the token ratios, as in appendix C of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import all_equal, group_advantages
from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.clipped import Clipped
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.surrogate import (
    LOG_RATIO_LIMIT,
    Surrogate,
    clip,
    ratio,
    response_mean,
)
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, SegmentSum, Statistics, tensor


@dataclass(frozen=True, kw_only=True)
class GrpoS(Clipped):
    """Settings of GRPO-S, with the paper's defaults.

    `beta1`, `beta2`: the weights of the outcome and of the entropy in the reward.
    `ratio`: the mean that combines the token ratios of a response, 'arithmetic' or 'geometric'.
    `correct_from`: the lowest reward that counts as correct.
    `eps`: a number that is added to every divisor.
    """

    coupling: ClassVar[Literal["token", "sequence"]] = "sequence"

    clip_high: float = 0.28
    aggregation: Aggregation = "sequence_mean"
    beta1: float = 1.0
    beta2: float = 0.1
    ratio: Literal["arithmetic", "geometric"] = "arithmetic"
    correct_from: float = 0.5
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta1 < 0 or self.beta2 < 0 or self.beta1 + self.beta2 == 0 or self.eps < 0:
            raise ValueError("beta1, beta2 and eps must be at least 0, and one beta above")
        refuse_by_token(self.aggregation, self.correction)

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "GRPO-S shapes rewards by the entropies of the log-prob pass"

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        number = _whole(kept.sequence_lengths).shape[0]
        return {
            "grpo_s/entropy": SegmentSum(kept.entropy, kept.sequence, number, kept.in_baseline),
            "grpo_s/length": SegmentSum(
                torch.ones_like(kept.entropy), kept.sequence, number, kept.in_baseline
            ),
        }

    def shaped(self, batch: TokenBatch, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Returns two tensors: the shaped rewards, [B] float64, and a mask over the responses, [B]
        bool. The mask is True for each response that meets two conditions: the response is part of
        the baseline of the advantages, and at least one token of the response passes all
        filters."""
        length = tensor(statistics, "grpo_s/length")
        counted, groups = length > 0, _whole(batch.groups)
        correct = _whole(batch.rewards) >= self.correct_from
        entropy = tensor(statistics, "grpo_s/entropy") / length.clamp_min(1)
        inverse = 1 / (entropy + self.eps)

        def share(x: Tensor, among: Tensor) -> Tensor:
            """Divides the value x of each response by the mean of x over responses in the same
            prompt group. The argument `among` is a mask of responses, [B] bool. The mean covers
            only responses whose mask value is True. Returns the quotients, [B]."""
            zeros = torch.zeros(batch.num_groups, dtype=torch.float64, device=x.device)
            number = zeros.index_add(0, groups, among.to(torch.float64))
            total = zeros.index_add(0, groups, torch.where(among, x, 0.0))
            return x * (number / (total + self.eps))[groups]

        right = self.beta1 + self.beta2 * share(entropy, counted & correct)
        wrong = self.beta1 + self.beta2 * share(inverse, counted & ~correct)
        reward = torch.where(correct, right, -wrong)
        return (reward if batch.penalties is None else reward + batch.penalties), counted

    def normalised(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns the advantage (r - mean) / (std + eps) of each response, [B] float64, where r is
        the shaped reward of the response. The mean and the standard deviation `std` are computed
        over the shaped rewards of the response's prompt group. The divisor of the variance is the
        number n of responses, not n - 1."""
        reward, counted = self.shaped(batch, statistics)
        groups = _whole(batch.groups)
        return group_advantages(
            reward, groups, counted, spread="population", eps=self.eps, number=batch.num_groups
        )

    def token_advantages(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        # A prompt that all or no responses solve could only teach entropy, so it gets no loss, as
        # in every method.
        correct = (_whole(batch.rewards) >= self.correct_from).to(torch.float64)
        counted, groups = tensor(statistics, "grpo_s/length") > 0, _whole(batch.groups)
        same = all_equal(correct, groups, counted, batch.num_groups)[groups]
        advantage = torch.where(same, 0.0, self.normalised(batch, statistics))
        return advantage[batch.sequence].to(batch.advantage.dtype)

    def surrogate(self, batch: TokenBatch, advantage: Tensor) -> Surrogate:
        whole = self.response_ratio(batch)
        return clip(whole, advantage, low=self.clip_low, high=self.clip_high, dual=self.dual_clip)

    def response_ratio(self, batch: TokenBatch) -> Tensor:
        """Returns for each token the importance ratio w of its response, [N]. The ratio is
        differentiable."""
        if self.ratio == "arithmetic":
            return response_mean(ratio(batch.log_prob, batch.old_log_prob), batch)
        mean = response_mean(batch.log_prob - batch.old_log_prob, batch)
        return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def refuse_by_token(aggregation: Aggregation, correction: Correction | None) -> None:
    """Refuses settings that treat the tokens of a response separately. The function serves methods
    that compute one importance ratio and one loss per response. Raises ValueError for an
    `aggregation` other than 'sequence_mean', for a correction with the level 'token', and for a
    correction with the setting `reject`."""
    if aggregation != "sequence_mean":
        raise ValueError("the loss is one number a response, so aggregation must be sequence_mean")
    if correction is not None and (correction.level == "token" or correction.reject is not None):
        raise ValueError(
            "the ratio is the response's, so correction.level must be sequence or geometric, and"
            " correction.reject null"
        )


def _whole(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError(
            "GRPO-S needs the groups, rewards and lengths of the whole batch, and the trainer gave"
            " none"
        )
    return value
