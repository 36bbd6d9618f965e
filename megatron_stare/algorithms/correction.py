"""Importance correction multiplies the policy loss by a weight, because the engine that samples and
the trainer that learns compute different probabilities for the same token.

    r = p_train / p_rollout = exp(ln p_old - ln p_rollout)
    R = r (token), or over the response the product of r (sequence) or exp(mean ln r) (geometric)

    truncate   weight min(R, high)                 TIS
    clip       weight clip(R, low, high)           CIS
    icepop     weight R inside [low, high], else 0; the token stays in the denominator
    mask       weight R, tokens outside [low, high] leave loss and denominator        MIS

The importance weight is detached, and multiplies the clipped policy loss. Truncated importance
sampling is described at fengyao.notion.site (off-policy-rl). "When Speed Kills Stability" (Liu, Li
et al. 2025) describes both the mode `mask` and an importance ratio R that all tokens of a response
share. The modes and the veto follow slime's mis.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.surrogate import LOG_RATIO_LIMIT
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Mean,
    Request,
    SegmentSum,
    Statistics,
    scalar,
    tensor,
)


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Settings of the importance correction.

    `mode`: the treatment of a ratio outside the bounds `low` and `high`.
    `level`: the way in which a token's ratio R is computed. The ratio R is compared with the bounds
        `low` and `high`. With 'token', R is the ratio p_train / p_rollout of the token itself. With
        'sequence', R is the product of the ratios p_train / p_rollout of all tokens in the
        response. With 'geometric', R is the geometric mean of these ratios.
    `low`, `high`: the bounds of the ratio R. The mode `truncate` uses only `high`.
    `reject`: a pair [lowest, highest] of bounds for the ratio p_train / p_rollout of a single
        token. A token whose ratio is below the lowest bound or above the highest bound is removed
        from the loss and from the denominator of the loss. The settings `mode` and `level` do not
        change the effect of `reject`. With the value null, `reject` removes no token.
    `veto`: the lowest token ratio p_train / p_rollout that a response may contain. A response with
        a token ratio below `veto` is removed from the loss and from the denominator of the loss.
        With the value null, `veto` removes no response.
    `normalise`: if true, every weight is divided by the mean weight over all kept tokens in the
        batch.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    mode: Literal["truncate", "clip", "mask", "icepop"] = "truncate"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.5
    high: float = 2.0
    reject: tuple[float, float] | None = None
    veto: float | None = None
    normalise: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError("correction: low must be at least 0 and below high")
        if self.reject is not None and not 0 <= self.reject[0] < self.reject[1]:
            raise ValueError("correction: reject must be [low, high] with 0 <= low < high")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ValueError("correction: veto must lie between 0 and 1, or be null")
        if self.normalise and self.level == "geometric":
            # geometric ratios are all near 1; slime refuses this combination too
            raise ValueError(
                "correction: normalise does not go with level geometric; use token or sequence"
            )

    @property
    def leaves_count(self) -> bool:
        return self.mode == "mask" or self.reject is not None or self.veto is not None

    def requests(self, batch: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        asked: dict[str, Request] = {}
        if self.level != "token":
            log_ratio = _log_ratio(batch)
            asked["correction/log_ratio"] = _by_response(log_ratio, batch)
            asked["correction/length"] = _by_response(torch.ones_like(log_ratio), batch)
        if self.veto is not None:
            asked["correction/vetoes"] = _by_response(
                (_log_ratio(batch).exp() < self.veto).to(torch.float32), batch
            )
        return asked

    def keep(self, batch: TokenBatch, known: Statistics) -> Tensor | None:
        if any(name not in known for name in self.requests(batch, known)):
            return None
        keep = torch.ones_like(batch.loss_mask)
        if self.mode == "mask":
            level = self._ratio(batch, known)
            keep = keep & (level >= self.low) & (level <= self.high)
        if self.reject is not None:
            own = _log_ratio(batch).exp()
            keep = keep & (own >= self.reject[0]) & (own <= self.reject[1])
        if self.veto is not None:
            keep = keep & (tensor(known, "correction/vetoes")[batch.sequence] == 0)
        return keep

    def final_requests(self, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        """Returns a request for the mean weight of the tokens that no filter removed. If
        `normalise` is false, the returned mapping is empty."""
        return (
            {"correction/mean": Mean(self.plain_weights(kept, known), kept.loss_mask)}
            if self.normalise
            else {}
        )

    def weights(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns a detached tensor [N] of the factors that multiply the policy losses of the
        tokens. If `normalise` is true, the factor of a token is the weight of the token divided by
        the mean weight of the kept tokens. If the mean weight of the kept tokens is 0 or NaN, every
        factor is 0 instead. The mean weight is NaN if no token is kept."""
        weight = self.plain_weights(batch, statistics)
        if not self.normalise:
            return weight
        mean = scalar(statistics, "correction/mean").to(weight.dtype)
        return torch.where(mean > 0, weight / mean, 0.0)

    def plain_weights(self, batch: TokenBatch, known: Statistics) -> Tensor:
        """Returns a tensor [N] of the weights before normalisation. Only the mode icepop gives
        weights of 0. With icepop, a token whose ratio R lies outside the bounds gets the weight
        0."""
        level = self._ratio(batch, known)
        match self.mode:
            case "truncate":
                return level.clamp_max(self.high)
            case "clip":
                return level.clamp(self.low, self.high)
            case "icepop":
                return torch.where((level >= self.low) & (level <= self.high), level, 0.0)
            case "mask":
                return level

    def _ratio(self, batch: TokenBatch, known: Statistics) -> Tensor:
        """Returns the ratio R of each token, [N]. With the level 'token', R is the ratio of the
        token alone. With 'sequence' and 'geometric', all tokens of a response share one ratio R."""
        own = _log_ratio(batch)
        if self.level == "token":
            return own.exp()
        total = tensor(known, "correction/log_ratio")
        if self.level == "geometric":
            total = total / tensor(known, "correction/length").clamp_min(1)
        return total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().to(own.dtype)[batch.sequence]


def _log_ratio(batch: TokenBatch) -> Tensor:
    """[N] ln r, detached."""
    return (
        (batch.old_log_prob - batch.rollout_log_prob)
        .detach()
        .clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    )


def _by_response(x: Tensor, batch: TokenBatch) -> SegmentSum:
    if batch.sequence_lengths is None:
        raise ValueError("correction by response needs sequence_lengths")
    # includes baseline responses without loss
    return SegmentSum(
        x, batch.sequence, batch.sequence_lengths.shape[0], batch.loss_mask | batch.in_baseline
    )
