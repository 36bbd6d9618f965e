"""GRPO (arXiv 2402.03300) combines group-relative advantages with the clipped surrogate. Most other
methods build on GRPO.

    A_i = (r_i - mean) / (std + 1e-6) over the prompt group
    J = mean_i (1 / n_i) sum_t min(rho A, clip(rho, 1 - low, 1 + high) A)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_stare.algorithms.advantage import Spread, group_advantages
from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.clipped import Clipped


@dataclass(frozen=True, kw_only=True)
class Grpo(Clipped):
    """Settings of GRPO, in addition to the settings of clipped.py and policy.py.

    `aggregation`: 'sequence_mean' averages over each response's tokens and then over responses, as
        in the paper. 'token_mean' averages over all tokens, as in DAPO and in most later code.
    `advantage_spread`: the divisor of the difference between a reward and the group's mean reward
        (see advantage.py). The paper does not say whether the variance is divided by n or by n - 1.
        Published code divides by n - 1.
    """

    aggregation: Aggregation = "sequence_mean"
    advantage_spread: Spread = "sample"

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return group_advantages(rewards, groups, counted, spread=self.advantage_spread)
