"""GRPO Done Right (arXiv 2503.20783) omits two divisions of GRPO. The division by the response's
length favours long wrong answers. The division by the standard deviation of the rewards favours
questions that are too easy or too hard. Short name: Dr. GRPO.

    A_i = r_i - mean        J = (1 / (B L_max)) sum_{i,t} min(rho A, clip(rho) A)

L_max is a constant. In the paper's recipe, L_max is 3000. In verl, the aggregation
seq-mean-token-sum-norm divides by L_max alone up to release 0.7, and by B L_max since release 0.8.
In this project, the aggregation 'dr_grpo_verl' divides by L_max alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.algorithms.advantage import Spread
from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo


@dataclass(frozen=True, kw_only=True)
class DrGrpo(Grpo):
    """Settings of GRPO Done Right, which are the settings of GRPO with the defaults of arXiv
    2503.20783.

    `length_norm`: L_max, tokens.
    """

    aggregation: Aggregation = "dr_grpo"
    length_norm: int | None = 3000
    advantage_spread: Spread = "none"
