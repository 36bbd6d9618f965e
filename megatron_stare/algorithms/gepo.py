"""GEPO (group-entropy policy optimisation, arXiv 2607.16850) multiplies the loss of each answer by
a weight. The weight depends on the mean surprisal of all answers to the same prompt. The GEPO of
arXiv 2508.17850 is another method, which changes importance weights.

    H_g = mean surprisal of the group's tokens        mu, sd over the groups of the batch
    low <- (1 - r) low + r (mu - 0.2 sd)              high <- (1 - r) high + r (mu + 0.3 sd)
    w = 0.5 where A > 0 and H_g < low                 w = 0.2 where A < 0 and H_g > high

The bounds are updated before the loss of the same step is computed. The first batch sets the
initial bounds. The formulas come from third-party code that quotes the paper, because no other
source was available. Two details are inferred. The standard deviation sd is computed with the
number of groups as divisor. The mean surprisal H_g covers the group's tokens in the mini-batch of
the current optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.reweighted import Reweighted, weight_metric
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, SegmentSum, Statistics, tensor
from megatron_stare.records.metric import Metric

METRICS = (
    weight_metric("gepo", "0.5 to 1"),
    Metric("gepo/low", "nats", "surprisal below which right groups are weighed less", "steady"),
    Metric("gepo/high", "nats", "surprisal above which wrong groups are weighed less", "steady"),
)


@dataclass(frozen=True, kw_only=True)
class Gepo(Reweighted):
    """Settings of GEPO.

    `weight_low`: the weight of positive advantages in prompt groups whose mean surprisal H_g is
        below the lower bound.
    `weight_high`: the weight of negative advantages in prompt groups whose mean surprisal H_g is
        above the upper bound. `weight_high` must be below `weight_low`; otherwise the response
        length falls towards 0.
    `spread_low`: the number of standard deviations by which a batch's lower bound lies below the
        batch's mean of H_g. Both the mean and the standard deviation are taken over the prompt
        groups.
    `spread_high`: the number of standard deviations by which a batch's upper bound lies above the
        batch's mean of H_g. Both the mean and the standard deviation are taken over the prompt
        groups.
    `rate`: r, the weight of the newest batch in the running average of the lower bound and in the
        running average of the upper bound.
    """

    weight_metric: ClassVar[str] = "gepo/weight"

    weight_low: float = 0.5
    weight_high: float = 0.2
    spread_low: float = 0.2
    spread_high: float = 0.3
    rate: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.weight_high < self.weight_low <= 1:
            raise ValueError(
                "weight_high must be at least 0 and below weight_low, which is at most 1"
            )
        if not 0 < self.rate <= 1 or self.spread_low < 0 or self.spread_high < 0:
            raise ValueError(
                "rate must lie in (0, 1], and spread_low and spread_high be at least 0"
            )

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "GEPO's first bounds come from the batch that they weigh"

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), "batches": 0.0, "low": 0.0, "high": 0.0}

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        whose, ones = self.groups(kept), torch.ones_like(kept.advantage)
        return {
            "gepo/sum": SegmentSum(kept.surprisal, whose, kept.num_groups, kept.loss_mask),
            "gepo/tokens": SegmentSum(ones, whose, kept.num_groups, kept.loss_mask),
        }

    def groups(self, batch: TokenBatch) -> Tensor:
        """Returns the prompt group of every token, [N]."""
        assert batch.groups is not None
        return batch.groups[batch.sequence]

    def surprisals(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Returns two tensors with one entry per group: the mean surprisal H_g, and a flag that is
        True if the group has tokens."""
        tokens = tensor(statistics, "gepo/tokens")
        return tensor(statistics, "gepo/sum") / tokens.clamp_min(1), tokens > 0

    def control(self, state: State, statistics: Statistics) -> State:
        state = super().control(state, statistics)
        found, present = self.surprisals(statistics)
        number = present.sum().to(torch.float64)
        mean = torch.where(present, found, 0.0).sum() / number
        sd = (torch.where(present, (found - mean) ** 2, 0.0).sum() / number).sqrt()
        rate = torch.where(state["batches"] > 0, self.rate, 1.0)
        new = {
            "low": (1 - rate) * state["low"] + rate * (mean - self.spread_low * sd),
            "high": (1 - rate) * state["high"] + rate * (mean + self.spread_high * sd),
            "batches": state["batches"] + 1,
        }
        usable = mean.isfinite()
        return state | {
            name: torch.where(usable, value, state[name]) for name, value in new.items()
        }

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        of_token = self.surprisals(statistics)[0][self.groups(batch)]
        less = (batch.advantage > 0) & (of_token < state["low"])
        least = (batch.advantage < 0) & (of_token > state["high"])
        one = torch.ones_like(of_token)
        return torch.where(less, self.weight_low, torch.where(least, self.weight_high, one))

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {
            **super().metrics(statistics, state),
            "gepo/low": state["low"],
            "gepo/high": state["high"],
        }
