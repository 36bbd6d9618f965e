"""Loss term that penalises the KL divergence from the reference policy.

Schulman's estimators (joschu.net/blog/kl-approx.html) are functions of d = ln p_ref - ln p at the
sampled token:

    k1 = -d        k2 = d^2 / 2        k3 = e^d - d - 1  (GRPO, arXiv 2402.03300)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from megatron_stare.algorithms.surrogate import LOG_RATIO_LIMIT

Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class ReferenceKl:
    """Settings of the KL term.

    `coef`: the weight of the KL term. If `coef` is 0, the reference policy is not loaded.
    `estimator`: 'k1', 'k2' or 'k3'. On-policy, the means of k1 and k3 are KL(p || p_ref), and the
        mean of k2 approximates KL(p || p_ref) near the reference. Of the three estimators, only k2
        has a mean gradient that equals the gradient of KL(p || p_ref). On-policy, the mean gradient
        of k3 is the gradient of KL(p_ref || p), not of KL(p || p_ref). The gradient of k1 has mean
        zero, so k1 measures the KL divergence without changing the policy.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    coef: float
    estimator: Estimator = "k3"

    def __post_init__(self) -> None:
        if self.coef < 0:
            raise ValueError("reference_kl: coef must be at least 0")


def kl_estimate(log_prob: Tensor, reference_log_prob: Tensor, estimator: Estimator) -> Tensor:
    """Returns the KL estimate of every token, [N], differentiable through log_prob."""
    d = (reference_log_prob.detach() - log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.exp() - d - 1
