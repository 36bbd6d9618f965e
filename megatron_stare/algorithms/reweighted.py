"""Base classes of methods that multiply each token's clipped loss by a weight. The class `Steered`
is for methods whose weights depend on a target entropy.

    J = (1 / N) sum_{i,t} w min(rho A, clip(rho, 1 - low, 1 + high) A)        w >= 0, detached
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.entropy_bonus import refuse_two_targets
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, Request, Statistics, scalar
from megatron_stare.records.metric import Metric


@dataclass(frozen=True, kw_only=True)
class Reweighted(Grpo):
    """Settings that all reweighting methods share. A subclass sets `weight_metric` to the name of
    the metric that logs the subclass's mean weight."""

    weight_metric: ClassVar[str]

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"

    @abstractmethod
    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        """Returns a factor for every token's loss, [N]. Factors are at least 0, and no gradient
        flows through them."""

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        base = super().policy_loss(batch, statistics, state)
        weights = self.weights(batch, statistics, state).detach().to(base.loss.dtype)
        shares = {**base.shares, self.weight_metric: weights}
        return replace(base, loss=weights * base.loss, shares=shares)


@dataclass(frozen=True, kw_only=True)
class Steered(Reweighted):
    """Settings of a method that updates its state from the mean entropy of all tokens in the loss
    mask.

    `entropy_target`: the target entropy, nats. If `entropy_target` is null, the state does not
        change.
    """

    entropy_target: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.entropy_target is not None and not self.entropy_target > 0:
            raise ValueError("entropy_target must be above 0 nats")
        refuse_two_targets(self.entropy_target, self.entropy_bonus)

    @abstractmethod
    def moved(self, state: State, above: Tensor) -> State:
        """Returns the new values of the state.

        Args:
            above: the mean entropy minus the target, nats, 0-dim float64.
        """

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        if self.entropy_target is None:
            return {}
        return {"entropy": Mean(batch.entropy, batch.loss_mask)}

    def control(self, state: State, statistics: Statistics) -> State:
        """Updates the method's state from the mean entropy. If the mean entropy is not finite, the
        method's state does not change."""
        state = super().control(state, statistics)
        if self.entropy_target is None:
            return state
        above = scalar(statistics, "entropy").to(torch.float64) - self.entropy_target
        return state | {
            name: torch.where(above.isfinite(), value, state[name])
            for name, value in self.moved(state, above).items()
        }

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        logged = super().metrics(statistics, state)
        if self.entropy_target is not None:
            logged["entropy/target"] = self.entropy_target
        return logged


def weight_metric(method: str, healthy: str) -> Metric:
    """Defines the metric METHOD/weight, which logs the mean of the token weights. `healthy`
    describes the values of the metric in a healthy run."""
    return Metric(f"{method}/weight", "factor", "mean of the weights", healthy)


def by_sign(advantage: Tensor, positive: Tensor | float, negative: Tensor | float) -> Tensor:
    """Returns a tensor [N] float64 with one value per token: `positive` if the token's advantage is
    above 0, `negative` if the advantage is below 0, and 1 if the advantage is 0."""
    one = torch.ones_like(advantage, dtype=torch.float64)
    return torch.where(
        advantage > 0, positive * one, torch.where(advantage < 0, negative * one, one)
    )
