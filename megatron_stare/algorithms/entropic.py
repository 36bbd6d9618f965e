"""EntroPIC (arXiv 2511.15248) steers the entropy by a proportional-integral controller, which
weighs right against wrong answers on the tokens of high probability.

    e = H - target        a = clip(K_p e + K_i sum of e, -1, 1)
    on tokens with p > bound: w = 1 + a where A > 0, w = 1 - a where A < 0; else w = 1

a is computed before the loss of the same step, unless the gate is lagged. As in the authors' code,
the sum of e has no bound, so a long time off the target is paid back by as long a time on the other
side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.entropy_bonus import refuse_two_targets
from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.reweighted import Reweighted, by_sign, weight_metric
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, Request, Statistics, scalar
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
class Entropic(Reweighted):
    """Settings of EntroPIC.

    entropy_target: the mean entropy to hold, nats.
    proportional, integral: K_p and K_i, per nat.
    probable_above: the probability above which a token is reweighted.
    """

    weight_metric: ClassVar[str] = "entropic/weight"

    entropy_target: float = 0.1
    proportional: float = 1.0
    integral: float = 0.01
    probable_above: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.entropy_target > 0:
            raise ValueError("entropy_target must be above 0 nats")
        if self.proportional < 0 or self.integral < 0:
            raise ValueError("proportional and integral must be at least 0")
        if not 0 <= self.probable_above < 1:
            raise ValueError("probable_above must lie in [0, 1)")
        refuse_two_targets(self.entropy_target, self.entropy_bonus)

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), "sum": 0.0, "alpha": 0.0}

    def asks(self, batch: TokenBatch, kept: TokenBatch, known: Statistics) -> Mapping[str, Request]:
        return {"entropy": Mean(batch.entropy, batch.loss_mask)}

    def control(self, state: State, statistics: Statistics) -> State:
        """Moves the controller. If the entropy is not finite, the controller stays as it was."""
        state = super().control(state, statistics)
        error = scalar(statistics, "entropy").to(torch.float64) - self.entropy_target
        total = state["sum"] + error
        alpha = (self.proportional * error + self.integral * total).clamp(-1, 1)
        finite = error.isfinite()
        return state | {
            "sum": torch.where(finite, total, state["sum"]),
            "alpha": torch.where(finite, alpha, state["alpha"]),
        }

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        bound = -math.log(self.probable_above) if self.probable_above > 0 else math.inf
        weights = by_sign(batch.advantage, 1 + state["alpha"], 1 - state["alpha"])
        return torch.where(batch.surprisal < bound, weights, 1.0)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {
            **super().metrics(statistics, state),
            "entropic/alpha": state["alpha"],
            "entropy/target": self.entropy_target,
        }
