"""GRPO (arXiv 2402.03300): group-relative advantages and the clipped surrogate; the base of most
other methods.

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
    """Settings of GRPO, besides those of clipped.py and policy.py.

    aggregation: 'sequence_mean' (the paper) or 'token_mean' (DAPO and most code since).
    advantage_spread: divisor of the centred reward. The paper leaves n or n - 1 open; code uses n -
        1.
    """

    aggregation: Aggregation = "sequence_mean"
    advantage_spread: Spread = "sample"

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return group_advantages(rewards, groups, counted, spread=self.advantage_spread)
