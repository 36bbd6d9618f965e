"""KL-Cov (arXiv 2505.22617) keeps some tokens close to the old policy by a penalty. The penalty
acts on the tokens with the highest covariance between advantage and log-prob.

    loss = -A rho + beta |ln p - ln p_old|  on the max(1, int(share N)) tokens of largest covariance
    loss = -A rho                           elsewhere

KL-Cov does not clip the ratio. The scripts of the released code set clip bounds, but the released
code ignores these bounds. With one optimizer step per rollout batch, ln p equals ln p_old, so the
penalty beta |ln p - ln p_old| has no gradient and KL-Cov has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import Spread, group_advantages
from megatron_stare.algorithms.covariance import budget, covariance, mean_requests
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.surrogate import ratio
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, Statistics, TopK, threshold
from megatron_stare.records.metric import Metric

METRICS = (
    Metric("kl_cov/share", "share", "tokens held to the old policy", "near algorithm.share"),
)


@dataclass(frozen=True, kw_only=True)
class KlCov(PolicyGradient):
    """Settings of KL-Cov, with the defaults of the paper's 7B runs.

    `share`: the share of all tokens that get the penalty beta |ln p - ln p_old|. The paper uses
        2e-3 for 7B models and 2e-4 for 32B models.
    `coef`: beta, the weight of the penalty. The weight beta is 1 in the original repository and 0.1
        in verl's configuration.
    `advantage_spread`: the divisor of the difference between a reward and the group's mean reward
        (see advantage.py).
    """

    share: float = 2e-3
    coef: float = 1.0
    advantage_spread: Spread = "sample"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or self.coef < 0:
            raise ValueError("share must lie in (0, 1] and coef be at least 0")

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return group_advantages(rewards, groups, counted, spread=self.advantage_spread)

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "KL-Cov holds tokens to their old log-probs"

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        asked = dict(mean_requests(kept))
        if "cov/tokens" in known:
            asked["held"] = TopK(
                covariance(kept, known), kept.index, kept.loss_mask, count=budget(known, self.share)
            )
        return asked

    def held(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns the mask of the tokens that get the penalty, [N] bool."""
        return threshold(statistics, "held").select(
            covariance(batch, statistics), batch.index, batch.loss_mask
        )

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        held = self.held(batch, statistics)
        free = -batch.advantage.detach() * ratio(batch.log_prob, batch.old_log_prob)
        distance = (batch.log_prob - batch.old_log_prob).abs()
        return TokenTerms(
            torch.where(held, free + self.coef * distance, free), {"kl_cov/share": held}
        )
