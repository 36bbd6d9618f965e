"""A user's own method, complete: improbable tokens are trained on less. Explained in
docs/algorithms/own_method.md.

    w = 1 / (1 + s / S)        J = (1 / N) sum_{i,t} w min(rho A, clip(rho) A)

with s the token's surprisal and S the largest of the whole batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.method import State, TokenTerms
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Max, Request, Statistics, scalar


@dataclass(frozen=True, kw_only=True)
class MyMethod(Grpo):
    """strength: how much surprisal counts; 0 is GRPO."""

    strength: float = 1.0

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        return {"largest": Max(kept.surprisal, kept.loss_mask)}

    def policy_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
        base = super().policy_loss(batch, statistics, state)
        largest = scalar(statistics, "largest").clamp_min(1e-6).to(base.loss.dtype)
        return replace(base, loss=base.loss / (1 + self.strength * batch.surprisal / largest))

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {
            **super().metrics(statistics, state),
            "my_method/largest": scalar(statistics, "largest"),
        }
