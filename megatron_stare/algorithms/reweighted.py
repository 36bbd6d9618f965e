"""Base of the methods that multiply each token's clipped loss by a weight of their own.

J = (1 / N) sum_{i,t} w min(rho A, clip(rho, 1 - low, 1 + high) A)        w >= 0, detached
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics
from megatron_stare.records.metric import Metric


@dataclass(frozen=True, kw_only=True)
class Reweighted(Grpo):
    """Settings that all of these methods share. A subclass names in `weight_metric` the metric that
    logs the mean of its weights."""

    weight_metric: ClassVar[str]

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"

    @abstractmethod
    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        """Returns the factor on the loss of every token, [N], at least 0. No gradient flows through
        the factor."""

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        base = super().policy_loss(batch, statistics, state)
        weights = self.weights(batch, statistics, state).detach().to(base.loss.dtype)
        shares = {**base.shares, self.weight_metric: weights}
        return replace(base, loss=weights * base.loss, shares=shares)


def weight_metric(method: str, healthy: str) -> Metric:
    """Defines the metric of a method's mean weight."""
    return Metric(f"{method}/weight", "factor", "mean of the weights", healthy)


def by_sign(advantage: Tensor, positive: Tensor | float, negative: Tensor | float) -> Tensor:
    """Returns `positive` where the advantage is above 0, `negative` where it is below 0, and 1
    where it is 0, [N] float64."""
    one = torch.ones_like(advantage, dtype=torch.float64)
    return torch.where(
        advantage > 0, positive * one, torch.where(advantage < 0, negative * one, one)
    )
