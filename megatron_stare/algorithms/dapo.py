"""DAPO (arXiv 2503.14476) has a token-mean loss, a higher upper clip bound and a soft overlong
punishment.

    J = (1 / N) sum_{i,t} min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A)
    reward += min(-(n - (L_max - L_cache)) / L_cache, 0)

The fourth part of DAPO, dynamic sampling, keeps only prompts whose responses differ in reward.
Dynamic sampling is part of the rollout, not of this method. The setting `truncated: mask` turns on
overlong filtering, which the paper uses for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.shaping import Overlong


@dataclass(frozen=True, kw_only=True)
class Dapo(Grpo):
    """Settings of DAPO: the settings of GRPO, with the defaults of the DAPO paper.

    `overlong`: the soft overlong punishment. Set `overlong.max_length` to the largest number of
        tokens that the run allows in a response.
    """

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"
    overlong: Overlong | None = field(default_factory=Overlong)
