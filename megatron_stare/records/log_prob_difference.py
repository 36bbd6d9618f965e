"""Difference between a rollout engine's log-probs and the trainer's, as reported by the ranks that
hold both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Summary of the absolute differences of some tokens.

    not_numbers: number of NaN differences.
    largest_number, mean_number: over the other differences; 0 if there are none.
    """

    tokens: int
    not_numbers: int
    largest_number: float
    mean_number: float

    @property
    def largest(self) -> float:
        """Largest difference; NaN if any is not a number."""
        return math.nan if self.not_numbers else self.largest_number

    @property
    def mean(self) -> float:
        """Mean difference; NaN if any is not a number."""
        return math.nan if self.not_numbers else self.mean_number


@dataclass(frozen=True)
class LogProbDifference:
    """Engine minus trainer over all tokens of a batch's loss mask, nats.

    everywhere: all tokens; a token that no rank compared counts as not a number.
    lowest: the smallest difference, with its sign; NaN if any is not a number.
    quantiles: quantiles of the absolute differences, by name.
    from_position: by the first position of a range of positions; ranges without tokens are left
        out.
    of_version: by the weight version that sampled the token.
    longest: tokens of the longest response; of several, the first.
    likely, unlikely: tokens with a probability of at least 1/1000 in the trainer, and those below.
    """

    everywhere: Sizes
    lowest: float
    quantiles: Mapping[str, float]
    from_position: Mapping[int, Sizes]
    of_version: Mapping[int, Sizes]
    longest: Sizes
    likely: Sizes
    unlikely: Sizes

    @property
    def largest(self) -> float:
        return self.everywhere.largest
