"""REPO-R (arXiv 2603.11682, appendix D.2) rescales advantages by the log-prob of the token.

    A > 0: A <- A max(1 - zeta L, 0)        A < 0: A <- A max(1 + zeta L, 0)
    L = ln p, or ln p + H with `centred`

With zeta above 0, rare tokens of right answers gain weight, and rare tokens of wrong answers lose
weight. In the paper, L is the centred log-prob ln p + H, where H is the entropy. In the public code
(a pull request to SkyRL), L is the log-prob ln p. With `entropy_target`, every step changes zeta
before the loss is computed. If `statistics.gate` is `lagged`, every step changes zeta after the
loss is computed. If the entropy is below the target, the step doubles a positive zeta or halves a
negative zeta. If the entropy is above the target, the step halves a positive zeta or doubles a
negative zeta. If halving would make |zeta| smaller than `zeta_min`, |zeta| becomes `zeta_min` and
the sign of zeta changes. The implementation of the rule for zeta follows a description of the
public code. The description does not state in which order the cases of the rule apply, so this
order is inferred.
"""

from __future__ import annotations

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
    weight_metric("repo_r", "near 1"),
    Metric(
        "repo_r/zeta",
        "1/nats",
        "coefficient of the log-prob in the weights",
        "within algorithm.zeta_max; long at the bound: the target is out of reach",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RepoR(Steered):
    """Settings of REPO-R.

    `zeta`: the coefficient. With an entropy target, `zeta` is the initial value of the coefficient.
    `zeta_min`, `zeta_max`: the bounds of |zeta| if there is an entropy target.
    `entropy_target`: the target of the mean entropy, nats. If `entropy_target` is null, zeta is
        fixed.
    `centred`: if true, L is the centred log-prob ln p + H. If `centred` is false, L is the log-prob
        ln p.
    """

    weight_metric: ClassVar[str] = "repo_r/weight"

    zeta: float = 0.01
    zeta_min: float = 1e-4
    zeta_max: float = 0.05
    centred: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.zeta_min <= self.zeta_max:
            raise ValueError("zeta_min must be above 0 and at most zeta_max")
        if self.entropy_target is not None and abs(self.zeta) > self.zeta_max:
            raise ValueError("zeta must lie within zeta_max of 0, if there is an entropy_target")

    @property
    def reads_log_prob_pass(self) -> str | None:
        if self.centred:
            return "REPO-R's centred weights read the entropies of the log-prob pass"
        return super().reads_log_prob_pass

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), "zeta": self.zeta}

    def moved(self, state: State, above: Tensor) -> State:
        way, size = -torch.sign(above), state["zeta"].abs()
        grown = (2 * size).clamp(self.zeta_min, self.zeta_max)
        halved = size / 2
        against = torch.where(halved < self.zeta_min, way * self.zeta_min, -way * halved)
        zeta = torch.where(state["zeta"] * way > 0, way * grown, against)
        return {"zeta": torch.where(above == 0, state["zeta"], zeta)}

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        likely = -batch.surprisal.to(torch.float64)
        if self.centred:
            likely = likely + batch.selecting_entropy.to(torch.float64)
        lean = state["zeta"] * likely
        return by_sign(batch.advantage, 1 - lean, 1 + lean).clamp_min(0)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        return {**super().metrics(statistics, state), "repo_r/zeta": state["zeta"]}
