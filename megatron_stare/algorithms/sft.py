"""Supervised fine-tuning minimises the negative log-likelihood of the tokens that the assistant
wrote.

    J = -(1 / N) sum_t log p(y_t | y_<t), over the N loss tokens of the optimizer step's batch

`transformers` computes the same loss if the labels outside the loss mask are -100.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import coefficients
from megatron_stare.algorithms.method import Method, State, TokenTerms
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics, scalar
from megatron_stare.records.rollout_batch import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Sft(Method):
    """Supervised fine-tuning. It has no settings."""

    supervised: ClassVar[bool] = True

    @property
    def reads_log_prob_pass(self) -> str | None:
        return None

    def carries_loss(self, batch: RolloutBatch) -> Tensor:
        return torch.ones_like(batch.verified)

    def baseline_mask(self, batch: RolloutBatch) -> Tensor:
        return torch.ones_like(batch.verified)

    def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        return torch.ones_like(rewards)

    def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        return TokenTerms(-batch.log_prob)

    def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        return coefficients(batch, "token_mean", scalar(statistics, "tokens"))

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {"loss/tokens": scalar(statistics, "tokens")}
