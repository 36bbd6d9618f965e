"""JustRL (arXiv 2512.16649) is plain GRPO with a higher upper clip bound.

    J = (1 / N) sum_{i,t} min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A), dual clip 10

JustRL uses no KL penalty, no entropy term, no dynamic sampling and no length penalty. The default
settings are taken from the repository thunlp/JustRL.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.grpo import Grpo


@dataclass(frozen=True, kw_only=True)
class JustRl(Grpo):
    """Settings of JustRL: the settings of GRPO, with the published defaults of JustRL."""

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    aggregation: Aggregation = "token_mean"
