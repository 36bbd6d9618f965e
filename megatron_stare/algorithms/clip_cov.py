"""Clip-Cov (arXiv 2505.22617) sets the loss to 0 for a few tokens that have a high covariance
between advantage and log-prob.

    candidates: low < cov < high, not already clipped
    max(1, int(share N)) of them, drawn at random, get loss 0; the denominator stays N

The released code draws at least one token per micro-batch, without a seed. This implementation
draws the tokens from the whole batch. The draw depends only on the seed, the step and the canonical
indices of the tokens, so the draw is the same in every layout. As in the released code, clip_low
and clip_high are 1, so the ratio is clipped to [0, 2].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.covariance import budget, covariance, mean_requests
from megatron_stare.algorithms.draw import uniform
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.algorithms.surrogate import clipped_surrogate
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Request, Statistics, TopK, threshold
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "clip_cov/share",
        "share",
        "tokens that lost their loss",
        "near algorithm.share; 0: no token lies within the bounds",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ClipCov(Grpo):
    """Settings of Clip-Cov, with the defaults of the released recipe.

    `share`: Clip-Cov sets the loss to 0 for at most this share of the tokens in the loss mask. If
        `share` times the number of tokens in the loss mask is below 1, Clip-Cov may still set the
        loss of one token to 0.
    `cov_low`, `cov_high`: a token can be drawn only if its covariance lies between these bounds.
    `seed`: the seed of the random draw.
    """

    clip_low: float = 1.0
    clip_high: float = 1.0
    aggregation: Aggregation = "token_mean"
    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or self.cov_low >= self.cov_high:
            raise ValueError("share must lie in (0, 1] and cov_low below cov_high")

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "Clip-Cov draws from tokens that the ratio to the old log-probs does not clip"

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        asked = dict(mean_requests(kept))
        if "cov/tokens" in known:
            asked["drawn"] = TopK(
                self.tickets(kept),
                kept.index,
                self.drawable(kept, known),
                count=budget(known, self.share),
            )
        return asked

    def tickets(self, batch: TokenBatch) -> Tensor:
        """Returns a random number for every token, [N]. The random numbers are the same in every
        parallel layout."""
        return uniform(self.seed, batch.step, batch.index)

    def candidates(self, batch: TokenBatch, known: Statistics) -> Tensor:
        """Returns a mask, [N] bool, which is True for the tokens whose covariance lies between
        `cov_low` and `cov_high`."""
        cov = covariance(batch, known)
        return batch.loss_mask & (cov > self.cov_low) & (cov < self.cov_high)

    def drawable(self, batch: TokenBatch, known: Statistics) -> Tensor:
        """Returns the mask of the tokens that can be drawn, [N] bool. A token can be drawn if its
        covariance lies between `cov_low` and `cov_high`, and if ratio clipping does not change the
        objective of the token. The ratio is exp(`batch.selected_by` - `batch.old_log_prob`),
        because methods select tokens by the log-probs in `batch.selected_by`."""
        surrogate = clipped_surrogate(
            batch.selected_by,
            batch.old_log_prob,
            batch.advantage,
            low=self.clip_low,
            high=self.clip_high,
            dual=self.dual_clip,
        )
        return self.candidates(batch, known) & ~surrogate.clipped

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        base = super().policy_loss(batch, statistics, state)
        drawn = threshold(statistics, "drawn").select(
            self.tickets(batch), batch.index, self.drawable(batch, statistics)
        )
        return TokenTerms(
            torch.where(drawn, 0.0, base.loss), {**base.shares, "clip_cov/share": drawn}
        )
