"""Group-relative advantages compare each response with the other responses to the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Spread = Literal["sample", "population", "none"]


def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    counted: Tensor,
    *,
    spread: Spread = "sample",
    eps: float = 1e-6,
    number: int | None = None,
) -> Tensor:
    """Returns the advantage (r - mean) / (std + eps) of each response, where r is the response's
    reward. The mean and the standard deviation `std` are computed over the rewards of the
    response's prompt group. Source: GRPO, arXiv 2402.03300.

    Args:
        rewards: [B] float64.
        groups: [B] int64 group numbers from 0.
        counted: [B] bool, the responses whose rewards the mean and the standard deviation cover.
            Every response that is not counted gets advantage 0.
        spread: the divisor of r - mean. 'sample' is the standard deviation with n - 1 (GRPO as in
            verl and slime). 'population' is the standard deviation with n. 'none' does not divide
            (Dr. GRPO, arXiv 2503.20783).
        eps: a number that is added to the standard deviation.
        number: the number of groups. If `number` is None, the number is computed from `groups`, and
            the host waits for the device.

    Returns:
        [B] float64. In a group with a single counted response, the advantage is r / (1 + eps), as
        in verl. With `spread` 'none' the advantage of such a response is r. If a group has several
        counted responses and their rewards are equal, the group's advantages are exactly 0, even if
        the mean is rounded. The exact 0 matters, because selections by advantage leave out tokens
        with advantage 0.
    """
    if number is None:
        number = int(groups.max()) + 1 if groups.numel() else 0
    weight = counted.to(rewards.dtype)
    rewards = torch.where(counted, rewards, 0.0)
    size = torch.zeros(number, dtype=rewards.dtype, device=rewards.device).index_add_(
        0, groups, weight
    )
    mean = torch.zeros_like(size).index_add_(0, groups, rewards * weight) / size.clamp_min(1)
    single = size[groups] == 1
    centred = torch.where(single, rewards, rewards - mean[groups])
    centred = torch.where(
        all_equal(rewards, groups, counted, number)[groups] & ~single, 0.0, centred
    )
    if spread == "none":
        return centred * weight
    squares = torch.zeros_like(size).index_add_(0, groups, weight * (rewards - mean[groups]) ** 2)
    freedom = size - 1 if spread == "sample" else size
    std = (squares / freedom.clamp_min(1)).sqrt()
    std = torch.where(size == 1, 1.0, std)
    return weight * centred / (std[groups] + eps)


def all_equal(x: Tensor, groups: Tensor, counted: Tensor, number: int) -> Tensor:
    """Returns a bool tensor with one entry for each group. `number` is the number of groups.
    `counted` is a bool tensor [B] that is False for the responses to ignore. A group's entry is
    True if all its counted responses have the same value in `x` [B], and also if it has no counted
    responses."""
    infinite = torch.full((number,), torch.inf, dtype=x.dtype, device=x.device)
    low = infinite.scatter_reduce(0, groups, torch.where(counted, x, torch.inf), "amin")
    high = (-infinite).scatter_reduce(0, groups, torch.where(counted, x, -torch.inf), "amax")
    return low >= high
