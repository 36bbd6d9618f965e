"""The entropy bonus lowers the loss by a coefficient times the entropy. The gradient flows through
the entropy H. The coefficient c is fixed, or adjusted so that the entropy reaches a target
(Skywork-OR1, arXiv 2505.22312).

    step k uses      c_k if the entropy was below target after step k - 1, else 0
    afterwards       c <- clip(c + delta if H_k < target else c - delta, min, max)

The entropy H_k of step k changes the coefficient that step k + 1 uses. The entropy H_k does not
change the coefficient of step k itself. The Skywork-OR1 paper uses the same order. The first step
uses the initial coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Mean, Request, Statistics, scalar

# names of the state and the statistic, prefixed so that they cannot collide with a method's state
COEF = "entropy_bonus/coef"
OPEN = "entropy_bonus/open"
USED = "entropy_bonus/used"
MEASURE = "entropy_bonus/measure"


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """Settings of the entropy bonus.

    `coef`: the coefficient c. With a target, `coef` is the initial value of c.
    `target`: the target entropy in nats. Every step changes the coefficient c to bring the entropy
        closer to the target. If `target` is null, the coefficient c is fixed.
    `delta`, `coef_min`, `coef_max`: with a target, every step moves the coefficient c by `delta`
        within [coef_min, coef_max].
    `measure`: the quantity that is compared with the target. 'entropy' is the mean entropy.
        'surprisal' is the mean surprisal of the sampled tokens, an estimate of the mean entropy.
        The released code of Skywork-OR1 uses the mean surprisal.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    coef: float = 0.0
    target: float | None = None
    delta: float = 1e-4
    coef_min: float = 0.0
    coef_max: float = 0.005
    measure: Literal["entropy", "surprisal"] = "entropy"

    def __post_init__(self) -> None:
        if self.target is None and self.coef <= 0:
            raise ValueError("entropy_bonus: give a coef above 0, or a target to steer it by")
        if self.coef < 0 or self.coef_min < 0 or self.coef_max < self.coef_min or self.delta <= 0:
            raise ValueError(
                "entropy_bonus: needs coef >= 0, delta > 0 and 0 <= coef_min <= coef_max"
            )

    def initial_state(self) -> dict[str, float]:
        return {COEF: self.coef, OPEN: 1.0, USED: self.coef}

    def requests(self, batch: TokenBatch) -> Mapping[str, Request]:
        if self.target is None:
            return {}
        return {
            MEASURE: Mean(
                batch.entropy if self.measure == "entropy" else batch.surprisal, batch.loss_mask
            )
        }

    def control(
        self, state: dict[str, torch.Tensor], statistics: Statistics
    ) -> dict[str, torch.Tensor]:
        """Returns the new state. In the new state, USED is the coefficient of this step, and COEF
        and OPEN determine the coefficient of the next step."""
        if self.target is None:
            return state
        entropy = scalar(statistics, MEASURE)
        finite, below = entropy.isfinite(), entropy < self.target
        move = self.delta * (2 * below.to(torch.float64) - 1)
        moved = (state[COEF] + move).clamp(self.coef_min, self.coef_max)
        return {
            **state,
            USED: state[COEF] * state[OPEN],
            # without a finite entropy, keep the old value
            COEF: torch.where(finite, moved, state[COEF]),
            OPEN: torch.where(finite, below.to(torch.float64), state[OPEN]),
        }


def refuse_two_targets(entropy_target: float | None, bonus: EntropyBonus | None) -> None:
    """Raises ValueError if a training method and its entropy bonus both have an entropy target."""
    if entropy_target is not None and bonus is not None and bonus.target is not None:
        raise ValueError(
            "entropy_target and entropy_bonus.target steer the same entropy; set one of them to"
            " null"
        )
