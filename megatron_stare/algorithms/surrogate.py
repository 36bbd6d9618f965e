"""The clipped policy-gradient surrogate that GRPO, DAPO and STARE share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp of more would overflow bf16 sums; the same bound as verl's


@dataclass(frozen=True)
class Surrogate:
    """`loss` [N] = -J and `clipped` [N] bool, where the clip took the gradient away."""

    loss: Tensor
    clipped: Tensor


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, low: float, high: float, dual: float | None
) -> Surrogate:
    """J = min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at least dual * A, with r = p / p_old.

    Sources: PPO, arXiv 1707.06347; separate bounds, DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729.

    Args:
        log_prob: [N] with gradient.
        old_log_prob: [N] detached.
        advantage: [N] detached.
        low: lower clip distance.
        high: upper clip distance.
        dual: the dual clip, above 1; None: off.
    """
    ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free = ratio * advantage
    bounded = ratio.clamp(1 - low, 1 + high) * advantage
    objective = torch.minimum(free, bounded)
    clipped = bounded < free
    if dual is not None:
        floor = dual * advantage
        below = (advantage < 0) & (objective < floor)
        objective = torch.where(below, floor, objective)
        clipped = clipped | below
    return Surrogate(loss=-objective, clipped=clipped)
