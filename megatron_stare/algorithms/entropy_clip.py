"""Clip_B and Clip_V (arXiv 2602.03392) remove tokens of wrong answers from the loss, if these
tokens would change the entropy far more than most tokens do.

    S = p (ln p + H)        Phi = S - E_v[S]        the mean E_v is over the vocabulary
    Clip_B: A < 0 and S - mean S < -mu std S lose their loss
    Clip_V: A < 0 and -Phi > mu std Phi lose their loss, at most max(1, int(max_share N)) tokens

Means and standard deviations are taken over the N tokens of the whole batch, with N as divisor. As
in the authors' code, the denominator of the loss does not count the removed tokens. Clip_V compares
-Phi with the threshold without subtracting the mean of Phi, as in the authors' code. Phi always
comes from the log-prob pass, for every value of `statistics.surprisal`. If the standard deviation
is below 1e-12, no token is removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_stare.algorithms.aggregate import Aggregation
from megatron_stare.algorithms.filters import Filter
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.sensitivity import sensitivity_of
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Count,
    Mean,
    Request,
    Statistics,
    TopK,
    scalar,
    threshold,
)

# The authors' guard for tokens that are all equal. It covers the rounding of the float64 sums, not
# that of float32 log-probs.
_FLAT = 1e-12


def _spread_requests(x: Tensor, mask: Tensor, known: Statistics) -> dict[str, Request]:
    """Returns a request for the mean of x over the tokens in `mask`. The variance of x is computed
    from the mean, so the variance can be requested only after the mean is known. If `known`
    contains the mean, the function also returns a request for the variance of x over the tokens in
    `mask`."""
    asked: dict[str, Request] = {"clip/mean": Mean(x, mask)}
    if "clip/mean" in known:
        asked["clip/variance"] = Mean((x - scalar(known, "clip/mean")) ** 2, mask)
    return asked


@dataclass(frozen=True, kw_only=True)
class _Clipped:
    """Filter of Clip_B."""

    mu: float

    @property
    def leaves_count(self) -> bool:
        return True

    def signal(self, batch: TokenBatch) -> Tensor:
        """Returns S, [N] float64."""
        log_prob = -batch.surprisal.to(torch.float64)
        return log_prob.exp() * (log_prob + batch.selecting_entropy.to(torch.float64))

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        return _spread_requests(self.signal(batch), batch.loss_mask, known)

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        if "clip/variance" not in known:
            return None
        std = scalar(known, "clip/variance").sqrt()
        low = self.signal(batch) - scalar(known, "clip/mean") < -self.mu * std
        return ~((batch.advantage < 0) & low & (std >= _FLAT))


@dataclass(frozen=True, kw_only=True)
class _LargestClipped:
    """Filter of Clip_V."""

    mu: float
    max_share: float

    @property
    def leaves_count(self) -> bool:
        return True

    def signal(self, batch: TokenBatch) -> Tensor:
        """Returns -Phi, [N] float64."""
        return -sensitivity_of(batch).to(torch.float64)

    def candidates(self, batch: TokenBatch, known: Statistics) -> Tensor:
        std = scalar(known, "clip/variance").sqrt()
        large = (self.signal(batch) > self.mu * std) & (std >= _FLAT)
        return batch.loss_mask & (batch.advantage < 0) & large

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        asked = _spread_requests(self.signal(batch), batch.loss_mask, known)
        asked["clip/tokens"] = Count(batch.loss_mask)
        if "clip/variance" in known:
            tokens = scalar(known, "clip/tokens").to(torch.float64)
            asked["clip/dropped"] = TopK(
                self.signal(batch),
                batch.index,
                self.candidates(batch, known),
                count=(tokens * self.max_share).floor().clamp_min(1),
            )
        return asked

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        if "clip/dropped" not in known:
            return None
        return ~threshold(known, "clip/dropped").select(
            self.signal(batch), batch.index, self.candidates(batch, known)
        )


@dataclass(frozen=True, kw_only=True)
class ClipB(Grpo):
    """Settings of Clip_B.

    `mu`: a token of negative advantage is removed if its value S = p (ln p + H) lies more than `mu`
        standard deviations below the mean of S.
    """

    aggregation: Aggregation = "token_mean"
    mu: float = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu > 0:
            raise ValueError("mu must be above 0")

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "Clip_B's mask reads the entropies of the log-prob pass"

    def filters(self) -> tuple[Filter, ...]:
        return (*super().filters(), _Clipped(mu=self.mu))


@dataclass(frozen=True, kw_only=True)
class ClipV(Grpo):
    """Settings of Clip_V.

    `mu`: a threshold for the entropy sensitivity Phi of a token (sensitivity.py). A token with
        negative advantage is a candidate for removal if -Phi is larger than `mu` times the standard
        deviation of Phi.
    `max_share`: sets the limit on the number of tokens that Clip_V removes. Of N tokens in the
        batch, Clip_V removes at most max(1, int(max_share N)). If the number of candidates is above
        the limit, Clip_V removes the candidates with the lowest Phi.
    """

    aggregation: Aggregation = "token_mean"
    mu: float = 8.5
    max_share: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mu > 0 or not 0 < self.max_share <= 1:
            raise ValueError("mu must be above 0 and max_share in (0, 1]")

    @property
    def needs_second_moment(self) -> bool:
        return True

    @property
    def reads_log_prob_pass(self) -> str | None:
        return "Clip_V's mask reads the entropy sensitivity of the log-prob pass"

    def filters(self) -> tuple[Filter, ...]:
        return (*super().filters(), _LargestClipped(mu=self.mu, max_share=self.max_share))
