"""20-Entropy, "Beyond the 80/20 rule" (arXiv 2506.01939), trains only on the forks, which are the
tokens of highest entropy.

    I = 1 for the k = max(1, int(N rho + 0.9999)) tokens of largest entropy, whatever the sign of
        their advantage
    J = (1 / sum I) sum_{i,t} I min(rho A, clip(rho, 1 - low, 1 + high) A)

The official code selects tokens in each micro-batch separately. This file selects the k tokens of
largest entropy in the whole batch. TRL and the setting `denominator: all` divide the loss by the
number of all tokens. Division by the number of all tokens makes the loss about five times smaller
than division by the number of kept tokens. In the formula for k, N is the number of tokens with a
nonzero advantage. According to the paper's text, N counts all response tokens, including tokens
with advantage 0. The setting `candidates: all` follows the paper's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.filters import Filter
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Count,
    Quantile,
    Request,
    Statistics,
    TopK,
    scalar,
    threshold,
)
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "forks/entropy_threshold",
        "nats",
        "lowest entropy among the tokens trained on",
        "above entropy/mean",
    ),
)


@dataclass(frozen=True, kw_only=True)
class HighEntropyTokens:
    """Filter that applies 20-Entropy's mask. The class `TwentyEntropy` documents the settings."""

    share: float
    rule: Literal["top_k", "quantile"]
    candidates: Literal["with_advantage", "all"]
    leaves_count: bool

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        candidates = self._candidates(batch)
        if self.rule == "quantile":
            return {"forks": Quantile(batch.selecting_entropy, candidates, 1 - self.share)}
        asked: dict[str, Request] = {"forks/candidates": Count(candidates)}
        if "forks/candidates" in known:
            k = fork_count(scalar(known, "forks/candidates"), self.share)
            asked["forks"] = TopK(batch.selecting_entropy, batch.index, candidates, count=k)
        return asked

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        if "forks" not in known:
            return None
        candidates = self._candidates(batch)
        if self.rule == "quantile":
            # compares float32 values, as the quantile was taken over float32
            return candidates & (
                batch.selecting_entropy.to(torch.float32).to(torch.float64)
                >= scalar(known, "forks")
            )
        return threshold(known, "forks").select(batch.selecting_entropy, batch.index, candidates)

    def _candidates(self, batch: TokenBatch) -> Tensor:
        # Groups with equal rewards have no advantage, so their tokens teach nothing but would fill
        # the quantile; the paper filters them before training.
        return (
            batch.loss_mask
            if self.candidates == "all"
            else batch.loss_mask & (batch.advantage != 0)
        )


def fork_count(n: Tensor, share: float) -> Tensor:
    """Returns k, the number of candidates that are kept, as a 0-dim tensor. If there are n
    candidates, k is max(1, int(n * share + 0.9999)). The official code uses the same rounding."""
    return (n.to(torch.float64) * share + 0.9999).floor().clamp_min(1)


@dataclass(frozen=True, kw_only=True)
class TwentyEntropy(Grpo):
    """Settings of 20-Entropy, with the paper's defaults.

    `share`: rho, the share of tokens that are kept.
    `rule`: 'top_k' keeps exactly k tokens. 'quantile' keeps the tokens whose entropy is at or above
        the (1 - share)-quantile, with linear interpolation, as TRL does.
    `candidates`: the tokens from which the filter selects the tokens to keep. 'with_advantage'
        selects from the tokens with a nonzero advantage. 'all' selects from all response tokens, as
        in the paper's text.
    `denominator`: 'kept' divides the loss by the number of kept tokens (the paper, eq. 6). 'all'
        divides the loss by the number of all tokens (TRL).
    """

    clip_high: float = 0.28
    dual_clip: float | None = 10.0
    aggregation: Aggregation = "token_mean"
    share: float = 0.2
    rule: Literal["top_k", "quantile"] = "top_k"
    candidates: Literal["with_advantage", "all"] = "with_advantage"
    denominator: Literal["kept", "all"] = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1:
            raise ValueError("share must lie in (0, 1]")

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "20-Entropy chooses tokens by the entropies of the log-prob pass"

    def filters(self) -> tuple[Filter, ...]:
        forks = HighEntropyTokens(
            share=self.share,
            rule=self.rule,
            candidates=self.candidates,
            leaves_count=self.denominator == "kept",
        )
        return (*super().filters(), forks)

    def metrics(
        self, statistics: Statistics, state: dict[str, Tensor]
    ) -> dict[str, Tensor | float]:
        forks = statistics["forks"]
        value = forks if isinstance(forks, Tensor) else forks.value
        return {**super().metrics(statistics, state), "forks/entropy_threshold": value}
