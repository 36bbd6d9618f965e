"""Settings of the clipped surrogate, for methods that clip the ratio of new to old
probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.surrogate import Surrogate, clipped_surrogate
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics
from megatron_stare.records.metric import Metric

METRICS = (
    Metric(
        "loss/clip_fraction",
        "share",
        "tokens whose gradient the clip removed",
        "0 with one update a batch; below 0.1 or so with several",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Clipped(PolicyGradient):
    """Settings of the clipped surrogate.

    `clip_low`, `clip_high`: the ratio is clipped to the range [1 - clip_low, 1 + clip_high].
    `dual_clip`: the upper bound of the ratio for negative advantages. `dual_clip` must be above 1.
        Null turns this bound off.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.clip_low <= 1 or self.clip_high <= 0:
            raise ValueError("clip_low must lie in (0, 1] and clip_high above 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("dual_clip must be above 1, or null")

    def token_advantages(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
        """Returns the advantages that multiply the ratio, [N]. `policy_loss` detaches the
        advantages."""
        return batch.advantage

    def surrogate(self, batch: TokenBatch, advantage: Tensor) -> Surrogate:
        return clipped_surrogate(
            batch.log_prob,
            batch.old_log_prob,
            advantage,
            low=self.clip_low,
            high=self.clip_high,
            dual=self.dual_clip,
        )

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        surrogate = self.surrogate(batch, self.token_advantages(batch, statistics).detach())
        return TokenTerms(loss=surrogate.loss, shares={"loss/clip_fraction": surrogate.clipped})
