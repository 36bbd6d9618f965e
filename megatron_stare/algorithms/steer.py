"""STEER (arXiv 2510.10150) attenuates the tokens that would raise or lower the entropy most.

    O = rho A (1 - p) (ln p + H)
    linear:      w = w_max - (w_max - w_min) (|O| - min |O|) / (max |O| - min |O|)
    exponential: w = exp(-k |O|) >= w_min        k = -ln w_min / max(max |O|, floor)

The formula of O only approximates the entropy change that a token causes. The exact first-order
change of the entropy is given by Phi (sensitivity.py). Phi contains a sum with one term for each
token of the vocabulary. O contains a term for the sampled token only. With
`statistics.surprisal: current`, p and rho come from the policy that is being updated, as in the
authors' code. By default, the token's probability p comes from the log-prob pass, and the
importance ratio rho is 1. This file takes the minimum and maximum over the whole batch, but the
authors' code takes both per micro-batch. A single token with an extreme |O| therefore sets the
scale for all tokens. In the authors' code, the weight function defaults to the linear map, but the
main script sets the exponential map with w_min = 0.8. If |O| is the same for all tokens, the linear
map gives every token the weight (w_min + w_max) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.reweighted import Reweighted, weight_metric
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Max, Request, Statistics, scalar
from megatron_stare.records.metric import Metric

METRICS = (
    weight_metric("steer", "near algorithm.weight_max, or 1 with `map: exponential`"),
    Metric("steer/largest", "nats", "largest |O|, which sets the scale", "no bound"),
)
_LIMIT = 20.0  # of a log ratio


@dataclass(frozen=True, kw_only=True)
class Steer(Reweighted):
    """Settings of STEER.

    `map`: the function from |O| to the weight, 'linear' or 'exponential'.
    `weight_min`, `weight_max`: bounds of the weight. The exponential map does not use `weight_max`.
    `floor`: the lower bound of max |O| in the exponential map.
    """

    weight_metric: ClassVar[str] = "steer/weight"

    dual_clip: float | None = 10.0
    map: Literal["linear", "exponential"] = "linear"
    weight_min: float = 0.8
    weight_max: float = 1.2
    floor: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.weight_min < 1 or self.weight_max < self.weight_min:
            raise ValueError("weight_min must lie in (0, 1) and weight_max be at least weight_min")
        if not self.floor > 0:
            raise ValueError("floor must be above 0")

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "STEER's weights read the entropies of the log-prob pass"

    def change(self, batch: TokenBatch) -> Tensor:
        """Returns |O|, [N] float64."""
        log_prob = -batch.surprisal.to(torch.float64)
        gap = log_prob - batch.old_log_prob.detach().to(torch.float64)
        ratio = gap.clamp(-_LIMIT, _LIMIT).exp()
        entropy = batch.selecting_entropy.to(torch.float64)
        advantage = batch.advantage.detach().to(torch.float64)
        return (ratio * advantage * (1 - log_prob.exp()) * (log_prob + entropy)).abs()

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        change = self.change(kept)
        return {
            "steer/largest": Max(change, kept.loss_mask),
            "steer/smallest": Max(-change, kept.loss_mask),
        }

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        change = self.change(batch)
        largest = scalar(statistics, "steer/largest").to(torch.float64)
        if self.map == "exponential":
            rate = -math.log(self.weight_min) / largest.clamp_min(self.floor)
            return (-rate * change).exp().clamp(self.weight_min, 1)
        smallest = -scalar(statistics, "steer/smallest").to(torch.float64)
        share = ((change - smallest) / (largest - smallest)).clamp(0, 1)
        share = torch.where(largest > smallest, share, 0.5)
        return self.weight_max - (self.weight_max - self.weight_min) * share

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        logged = super().metrics(statistics, state)
        return {**logged, "steer/largest": scalar(statistics, "steer/largest")}
