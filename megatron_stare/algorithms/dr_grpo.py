"""Dr. GRPO (arXiv 2503.20783) is GRPO without the two divisions that favour long wrong answers and
easy questions.

    A_i = r_i - mean        J = (1 / (B L_max)) sum_{i,t} min(rho A, clip(rho) A)

L_max is a constant, 3000 in the paper's recipe. From release 0.8, verl's seq-mean-token-sum-norm
also divides by B L_max. Up to release 0.7, verl divided by L_max alone. The aggregation
'dr_grpo_verl' also divides by L_max alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.algorithms.advantage import Spread
from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo


@dataclass(frozen=True, kw_only=True)
class DrGrpo(Grpo):
    """Settings of Dr. GRPO, which are the settings of GRPO with the defaults of the Dr. GRPO paper.

    length_norm: L_max, tokens.
    """

    aggregation: Aggregation = "dr_grpo"
    length_norm: int | None = 3000
    advantage_spread: Spread = "none"
