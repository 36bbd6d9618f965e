"""EntroPIC (arXiv 2511.15248) steers the entropy with a proportional-integral controller. The
controller's output alpha changes the weights of probable tokens only. A token is probable if its
probability p is above a bound.

    e = H - target        alpha = clip(K_p e + K_i sum of e, -1, 1)
    on tokens with p > bound: w = 1 + alpha where A > 0, w = 1 - alpha where A < 0; else w = 1

By default, the controller computes the output alpha in every step before the trainer computes the
loss. If `statistics.gate` is `lagged`, the controller computes alpha after the loss, and the loss
of the next step uses this value of alpha. As in the authors' code, the controller does not bound
the sum of the errors e = H - target. After a long time above the target, the entropy therefore
stays below the target for about as long, and vice versa.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.reweighted import Steered, by_sign, weight_metric
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics
from megatron_stare.records.metric import Metric

METRICS = (
    weight_metric("entropic", "near 1"),
    Metric(
        "entropic/alpha",
        "factor",
        "output of the controller",
        "within -1 and 1; long at a bound: the target is out of reach",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Entropic(Steered):
    """Settings of EntroPIC.

    `entropy_target`: the mean entropy that the controller aims for, in nats.
    `proportional`, `integral`: the controller's gains K_p and K_i, in units of 1/nat.
    `probable_above`: the probability above which a token is reweighted.
    """

    weight_metric: ClassVar[str] = "entropic/weight"

    entropy_target: float = 0.1
    proportional: float = 1.0
    integral: float = 0.01
    probable_above: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proportional < 0 or self.integral < 0:
            raise ValueError("proportional and integral must be at least 0")
        if not 0 <= self.probable_above < 1:
            raise ValueError("probable_above must lie in [0, 1)")

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), "sum": 0.0, "alpha": 0.0}

    def moved(self, state: State, above: Tensor) -> State:
        total = state["sum"] + above
        alpha = (self.proportional * above + self.integral * total).clamp(-1, 1)
        return {"sum": total, "alpha": alpha}

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        bound = -math.log(self.probable_above) if self.probable_above > 0 else math.inf
        weights = by_sign(batch.advantage, 1 + state["alpha"], 1 - state["alpha"])
        return torch.where(batch.surprisal < bound, weights, 1.0)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {**super().metrics(statistics, state), "entropic/alpha": state["alpha"]}
