"""Computes length penalties on rewards, and finds the prompt groups whose rewards differ. Also
defines names for the treatments of truncated responses. The functions run on whole batches, on the
host.

In shapes, B is the number of responses, and G is the number of prompt groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import all_equal

# keep: like any other response; mask: no loss, but in the baseline; drop: as if never sampled
Truncated = Literal["keep", "mask", "drop"]


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476) is added to a reward before the advantage
    is computed. For a response of n tokens, the punishment is:

        min(-(n - (max_length - cache)) / cache * factor, 0)

    `max_length`: the largest number of tokens that the run allows in a response.
    `cache`: a number of tokens. The size of the penalty grows linearly with the response length:
        from 0 at `max_length - cache` tokens to `factor` at `max_length` tokens.
    `factor`: the size of the penalty at max_length.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    max_length: int = 20480
    cache: int = 4096
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max_length or self.factor <= 0:
            raise ValueError("overlong: needs 0 < cache <= max_length and factor above 0")

    def penalty(self, lengths: Tensor) -> Tensor:
        """Computes the penalty of each response, [B] float64, from the response lengths [B]. Every
        penalty is at most 0."""
        over = lengths.to(torch.float64) - (self.max_length - self.cache)
        return (-over / self.cache * self.factor).clamp_max(0)


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """Group Relative Overlong Punishment (GROP; GTPO and GRPO-S, arXiv 2508.04349, appendix D).

    A group is easy if its share of correct responses is at least `easy_from`, and hard if the share
    is at most 1 - easy_from. Every other group is of medium difficulty. Every group that is not
    hard has a typical response length L = max((shortest + longest) / 2, mean). In an easy group,
    the typical length L is computed from the lengths of the correct responses. In a group of medium
    difficulty, the typical length L is computed from the lengths of both the correct and the wrong
    responses. The penalty of a correct response of length n is 0 for n < L, -(n - L) / (2 L) for n
    up to 2 L, and -1/2 for larger n. Hard groups get no penalty. A group of medium difficulty gets
    no penalty if at most half of the group's responses are correct. The paper leaves open whether
    such a group gets a penalty.

    `easy_from`: the lowest share of correct responses in an easy group. In the GROP paper,
        `easy_from` is called gamma_1. The paper gives no value for gamma_1.
    `correct_from`: the lowest reward that counts as correct.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    easy_from: float = 0.75
    correct_from: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.easy_from <= 1:
            raise ValueError("length_penalty: easy_from must lie in (0, 1]")

    def regimes(self, correct: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        """Returns the difficulty of each group, [G] int64: 0 for hard, 1 for medium, and 2 for
        easy."""
        size, right = _per_group(counted, groups), _per_group(counted & correct, groups)
        share = right / size.clamp_min(1)
        return torch.where(
            share >= self.easy_from, 2, torch.where(share <= 1 - self.easy_from, 0, 1)
        )

    def penalty(self, lengths: Tensor, correct: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
        """Returns penalties, [B] float64. Every penalty is at most 0.

        Args:
            lengths: [B] int64 tokens of each response.
            correct: [B] bool.
            groups: [B] int64 from 0.
            counted: [B] bool, the responses that count in their groups.
        """
        regime = self.regimes(correct, groups, counted)
        size, right = _per_group(counted, groups), _per_group(counted & correct, groups)
        n = lengths.to(torch.float64)
        limit = _typical_length(n, groups, counted & (correct | (regime == 1)[groups]), len(size))[
            groups
        ]
        applies = (regime == 2) | ((regime == 1) & (2 * right > size))
        ramp = torch.where(
            n < limit, 0.0, torch.where(n < 2 * limit, -0.5 * (n - limit) / limit, -0.5)
        )
        return torch.where(applies[groups] & correct & counted, ramp, 0.0)


def _per_group(flags: Tensor, groups: Tensor) -> Tensor:
    """Returns the number of True entries of `flags` [B] in each group, as a float64 tensor [G]."""
    number = int(groups.max()) + 1 if groups.numel() else 0
    return torch.zeros(number, dtype=torch.float64).index_add_(0, groups, flags.to(torch.float64))


def _typical_length(n: Tensor, groups: Tensor, over: Tensor, number: int) -> Tensor:
    """Returns the typical response length of each prompt group, [G] float64. The typical length is
    max((shortest + longest) / 2, mean). The mask `over`, [B] bool, selects the responses whose
    lengths enter the formula. If the mask selects no response of a group, the typical length of the
    group is 1."""
    infinite = torch.full((number,), torch.inf, dtype=n.dtype)
    low = infinite.scatter_reduce(0, groups, torch.where(over, n, torch.inf), "amin")
    high = (-infinite).scatter_reduce(0, groups, torch.where(over, n, -torch.inf), "amax")
    count = _per_group(over, groups)
    mean = torch.zeros(number, dtype=n.dtype).index_add_(
        0, groups, torch.where(over, n, 0.0)
    ) / count.clamp_min(1)
    return torch.where(count > 0, torch.maximum((low + high) / 2, mean), 1.0)


def informative_groups(values: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
    """Returns a bool mask [G] with one entry per prompt group. A group's entry is True if at least
    two responses of the group have different values in `values` [B]. The function compares only
    responses for which the mask `counted`, [B] bool, is True. DAPO's dynamic sampling (arXiv
    2503.14476) drops the prompt groups in which all rewards are equal."""
    number = int(groups.max()) + 1 if groups.numel() else 0
    return ~all_equal(values.to(torch.float64), groups, counted, number)
