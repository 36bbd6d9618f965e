"""GRPO (arXiv 2402.03300): group-relative advantages and the clipped surrogate. The base of the other methods."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_stare.algorithms.advantage import Spread, group_advantages
from megatron_stare.algorithms.aggregate import Aggregation, coefficients
from megatron_stare.algorithms.method import Method, State, TokenTerms
from megatron_stare.algorithms.surrogate import clipped_surrogate
from megatron_stare.batch import TokenBatch
from megatron_stare.statistics import Statistics, scalar


@dataclass(frozen=True, kw_only=True)
class Grpo(Method):
    """Settings of GRPO.

    clip_low, clip_high: distance of the ratio's bounds from 1.
    dual_clip: bound for negative advantages, above 1; null: off.
    aggregation: 'sequence_mean' (the paper) or 'token_mean' (DAPO and most code since).
    advantage_spread: what the centred reward is divided by.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "sequence_mean"
    advantage_spread: Spread = "sample"

    def __post_init__(self) -> None:
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            raise ValueError("clip_low must lie in (0, 1] and clip_high above 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1, or null")

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return group_advantages(rewards, groups, counted, spread=self.advantage_spread)

    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        surrogate = clipped_surrogate(
            batch.log_prob,
            batch.old_log_prob,
            batch.advantage,
            low=self.clip_low,
            high=self.clip_high,
            dual=self.dual_clip,
        )
        return TokenTerms(loss=surrogate.loss, shares={"loss/clip_fraction": surrogate.clipped})

    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        return coefficients(batch, self.aggregation, scalar(statistics, "tokens"))
