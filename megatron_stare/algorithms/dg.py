"""DG, the Delightful Policy Gradient (arXiv 2603.14608), weights each token by a smooth function of
its advantage and surprisal.

    w = sigmoid(A s / eta)        s = -ln p of the sampled token
    J = (1 / N) sum_{i,t} w min(rho A, clip(rho, 1 - low, 1 + high) A)

Rare tokens of right answers get a weight near 1. Rare tokens of wrong answers get a weight near 0.
Tokens of high probability get a weight near 1/2. DG therefore acts like STARE's variant C2, but
needs no quantile, no gate and no collective operation. The paper does not clip the ratio. In the
paper, p is the probability of the sampled token under the policy that is being updated. With the
setting `statistics.surprisal: current`, DG also computes p under the policy that is being updated.
By default, DG takes p from the log-prob pass. The default differs from the paper only if a batch
gets several updates. The setting `entropy_target` is not in the paper. With `entropy_target`, DG
uses the weight w only while the mean entropy of the batch is below the target. While the mean
entropy is at or above the target, every token has the weight 1/2. The weights w of a batch have a
mean near 1/2. The size of a step therefore hardly changes when the entropy reaches the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_stare.algorithms.method import State
from megatron_stare.algorithms.reweighted import Steered, weight_metric
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics
from megatron_stare.records.metric import Metric

METRICS = (
    weight_metric("dg", "near 1/2: right and wrong answers' rare tokens balance"),
    Metric(
        "dg/gate", "0 or 1", "1: tokens are weighted; logged only with entropy_target", "switches"
    ),
)


@dataclass(frozen=True, kw_only=True)
class Dg(Steered):
    """Settings of DG, with the paper's temperature.

    `eta`: the temperature of the weights. The smaller `eta` is, the closer the weights are to 0 or
        1.
    `entropy_target`: the target entropy in nats, or null. DG uses the weight w = sigmoid(A s / eta)
        of each token only while the mean entropy of the batch is below `entropy_target`. Otherwise,
        every token has the weight 1/2. If `entropy_target` is null, DG uses the weights w in every
        step.
    """

    weight_metric: ClassVar[str] = "dg/weight"

    eta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eta > 0:
            raise ValueError("eta must be above 0")

    def initial_state(self) -> dict[str, float]:
        return {**super().initial_state(), "gate": 1.0}

    def moved(self, state: State, above: Tensor) -> State:
        """Opens or closes the gate."""
        return {"gate": (above < 0).to(torch.float64)}

    def weights(self, batch: TokenBatch, statistics: Statistics, state: State) -> Tensor:
        advantage = batch.advantage.detach()
        delight = torch.sigmoid(advantage * batch.surprisal.to(advantage.dtype) / self.eta)
        return 0.5 + state["gate"].to(advantage.dtype) * (delight - 0.5)

    def metrics(self, statistics: Statistics, state: State) -> dict[str, Tensor | float]:
        logged = super().metrics(statistics, state)
        return logged if self.entropy_target is None else {**logged, "dg/gate": state["gate"]}
