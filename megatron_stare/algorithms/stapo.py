"""STAPO (arXiv 2602.15620) silences spurious tokens, which means that these tokens leave the loss.
A spurious token is an improbable token that a correct answer contains by accident.

    I = 0 if A > 0 and p < tau_p and H < tau_h, else 1
    J = (1 / sum I) sum_{i,t} I min(rho A, clip(rho, 1 - low, 1 + high) A)

A token is a candidate if its advantage A is positive and its probability p is below tau_p. In v4 of
the paper, the entropy threshold tau_h is the q-quantile of the entropy over all candidates in the
batch. In v1 of the paper, the entropy threshold tau_h is the q-quantile of the entropy over all
tokens. Comparisons are strict. If a batch has no candidates, STAPO silences no token of the batch.
No official code is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.filters import Filter
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Interpolation,
    Quantile,
    Request,
    Statistics,
    scalar,
)
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "stapo/entropy_threshold",
        "nats",
        "tau_h: an improbable token of a right answer is spurious below this entropy",
        "steady; NaN without candidates (v4)",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SpuriousTokens:
    """Filter that applies STAPO's mask. The class `Stapo` documents the settings."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    tau_p: float = 0.002
    version: Literal["v4", "v1"] = "v4"
    quantile: float = 0.75
    interpolation: Interpolation = "linear"
    denominator: Literal["kept", "all"] = "kept"

    def __post_init__(self) -> None:
        if not 0 < self.tau_p < 1 or not 0 <= self.quantile <= 1:
            raise ValueError("tau_p must lie in (0, 1) and quantile in [0, 1]")

    @property
    def leaves_count(self) -> bool:
        return self.denominator == "kept"

    def candidates(self, prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        """Returns the mask of the improbable tokens with positive advantage, [N] bool."""
        return mask & (advantage > 0) & (prob < self.tau_p)

    def threshold(self, entropy: Tensor, candidates: Tensor, mask: Tensor) -> Quantile:
        """Returns the request for tau_h."""
        return Quantile(
            entropy, candidates if self.version == "v4" else mask, self.quantile, self.interpolation
        )

    def spared(self, entropy: Tensor, candidates: Tensor, tau_h: Tensor) -> Tensor:
        """Returns the mask of the tokens that are not silenced, [N] bool. If there are no
        candidates, no token is silenced. In version 'v4', the entropy threshold tau_h is then
        NaN."""
        # Compares float32 values, as the quantile was taken over float32; else the token at the
        # quantile could fall below it
        return ~(candidates & (entropy.to(torch.float32).to(torch.float64) < tau_h))

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        candidates = self.candidates((-batch.surprisal).exp(), batch.advantage, batch.loss_mask)
        return {
            "stapo/entropy": self.threshold(batch.selecting_entropy, candidates, batch.loss_mask)
        }

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        if "stapo/entropy" not in known:
            return None
        candidates = self.candidates((-batch.surprisal).exp(), batch.advantage, batch.loss_mask)
        return self.spared(batch.selecting_entropy, candidates, scalar(known, "stapo/entropy"))


@dataclass(frozen=True, kw_only=True)
class Stapo(Grpo):
    """Settings of STAPO, with the defaults of version 4 of the paper.

    `tau_p`: the probability below which a token can be spurious.
    `version`: the version of the paper. 'v4' takes the entropy quantile over the candidates. 'v1'
        takes the entropy quantile over all tokens.
    `quantile`: q. The entropy threshold is the q-quantile of the entropy. Version 4 of the paper
        uses q = 0.75. Version 1 of the paper names two values of q, 0.8 and 0.2.
    `interpolation`: the rule by which a quantile that falls between two entropies is interpolated.
        The paper does not specify the interpolation.
    `denominator`: 'kept' divides the loss by the number of kept tokens, as in the paper. 'all'
        divides the loss by the number of all tokens.
    """

    clip_high: float = 0.28
    aggregation: Aggregation = "token_mean"
    tau_p: float = 0.002
    version: Literal["v4", "v1"] = "v4"
    quantile: float = 0.75
    interpolation: Interpolation = "linear"
    denominator: Literal["kept", "all"] = "kept"

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "STAPO's mask reads the entropies of the log-prob pass"

    def filters(self) -> tuple[Filter, ...]:
        spurious = SpuriousTokens(
            tau_p=self.tau_p,
            version=self.version,
            quantile=self.quantile,
            interpolation=self.interpolation,
            denominator=self.denominator,
        )
        return (*super().filters(), spurious)

    def metrics(
        self, statistics: Statistics, state: dict[str, Tensor]
    ) -> dict[str, Tensor | float]:
        return {
            **super().metrics(statistics, state),
            "stapo/entropy_threshold": scalar(statistics, "stapo/entropy"),
        }
