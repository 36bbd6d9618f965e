"""OPEFO (arXiv 2605.11491) balances the tokens that raise the entropy against the tokens that lower
the entropy.

    c = -A Phi                          a token's first-order change of the entropy (sensitivity.py)
    F+ = sum of the c of L+ and U-      F- = -sum of the c of U+ and L-
    lambda = (F- - F+) / (F+ + F-)
    w = 1 + lambda on L+ and U-         w = 1 - lambda on U+ and L-

With the weights w, the sums F+ and F- both become 2 F+ F- / (F+ + F-), so their effects on the
entropy cancel. Suppose that all tokens have the same coefficient in the loss (token_mean, no
importance correction), and that a gradient step starts at the policy that sampled the tokens. This
gradient step then leaves the entropy unchanged to first order. OPEFO has no target entropy: the
weights keep the entropy at its present value. Only summaries of the paper were available. The
following detail is therefore inferred and not taken from the paper: F+ and F- use the exact Phi of
all tokens in the whole batch. Phi always comes from the log-prob pass, for every value of
`statistics.surprisal`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.reweighted import Reweighted, weight_metric
from megatron_stare.algorithms.sensitivity import quadrants, sensitivity_of
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, Statistics, Sum, scalar
from megatron_stare.records.metric import Metric

METRICS = (
    weight_metric("opefo", "near 1"),
    Metric(
        "opefo/lambda",
        "share",
        "imbalance of the tokens that lower and that raise the entropy",
        "0 to 0.5: without the weights, the entropy would fall",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Opefo(Reweighted):
    """Settings of GRPO. OPEFO adds no settings, because lambda is computed from the batch."""

    weight_metric: ClassVar[str] = "opefo/weight"

    @property
    def needs_second_moment(self) -> bool:
        return True

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "OPEFO's weights read the entropy sensitivity of the log-prob pass"

    def sides(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three tensors [N]: each token's change c of the entropy, the mask of the tokens
        that raise the entropy, and the mask of the tokens that lower the entropy."""
        phi = sensitivity_of(batch)
        part = quadrants(batch, phi)
        raising = part["rare_plus"] | part["common_minus"]
        lowering = part["common_plus"] | part["rare_minus"]
        return -batch.advantage.detach() * phi, raising, lowering

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        change, raising, lowering = self.sides(kept)
        # the Phi of a token that counts as common for its size may have the other sign; without the
        # clamps, lambda could then leave [-1, 1]
        return {
            "opefo/raised": Sum(change.clamp_min(0), raising),
            "opefo/lowered": Sum((-change).clamp_min(0), lowering),
        }

    def imbalance(self, statistics: Statistics) -> Tensor:
        """Returns lambda, 0-dim, between -1 and 1. If no token changes the entropy, lambda is 0."""
        raised = scalar(statistics, "opefo/raised").to(torch.float64)
        lowered = scalar(statistics, "opefo/lowered").to(torch.float64)
        whole = raised + lowered
        return torch.where(whole > 0, (lowered - raised) / whole, 0.0)

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        _, raising, lowering = self.sides(batch)
        imbalance = self.imbalance(statistics)
        return torch.where(
            raising, 1 + imbalance, torch.where(lowering, 1 - imbalance, torch.ones_like(imbalance))
        )

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {**super().metrics(statistics, state), "opefo/lambda": self.imbalance(statistics)}
