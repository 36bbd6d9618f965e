"""CISPO (MiniMax-M1, arXiv 2506.13585) clips the importance weight instead of the update, so that
every token keeps a gradient.

    J = (1 / N) sum_{i,t} sg[clip(rho, 1 - low, 1 + high)] A ln p

The paper sets no lower bound for the weight. With low = 1, the lower bound 1 - low is 0. This bound
clips no weight, because all weights are positive. The paper gives no number for the upper bound of
the weight. By default, `high` is 4, which is the value that slime suggests. In TRL, `epsilon_high`
is the upper bound itself (rho <= epsilon_high). In this module and in slime, the weight is at most
1 + high.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_stare.algorithms.advantage import Spread, group_advantages
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.surrogate import weighted_likelihood
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics


@dataclass(frozen=True, kw_only=True)
class Cispo(PolicyGradient):
    """Settings of CISPO.

    `clip_low`: the distance from 1 down to the lower bound of the weight. With `clip_low` = 1, the
        weight has no lower bound.
    `clip_high`: the distance from 1 up to the upper bound of the weight.
    `advantage_spread`: the divisor of the difference between a reward and the group's mean reward
        (see advantage.py).
    """

    clip_low: float = 1.0
    clip_high: float = 4.0
    advantage_spread: Spread = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            raise ValueError("clip_low must lie in (0, 1] and clip_high above 0")

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return group_advantages(rewards, groups, counted, spread=self.advantage_spread)

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        surrogate = weighted_likelihood(
            batch.log_prob,
            batch.old_log_prob,
            batch.advantage.detach(),
            low=self.clip_low,
            high=self.clip_high,
        )
        return TokenTerms(loss=surrogate.loss, shares={"loss/clip_fraction": surrogate.clipped})
