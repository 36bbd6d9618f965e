"""How far a rollout engine's log-probs lie from the trainer's: what the ranks that hold both tell
of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of the absolute differences of some tokens.

    not_numbers: how many are NaN.
    largest_number, mean_number: of the others; 0 if there are none.
    """

    tokens: int
    not_numbers: int
    largest_number: float
    mean_number: float

    @property
    def largest(self) -> float:
        """NaN where one is not a number."""
        return math.nan if self.not_numbers else self.largest_number

    @property
    def mean(self) -> float:
        """NaN where one is not a number."""
        return math.nan if self.not_numbers else self.mean_number


@dataclass(frozen=True)
class LogProbDifference:
    """Engine minus trainer over all tokens of a batch's loss mask, nats.

    everywhere: a token that no rank compared counts as not a number.
    lowest: the smallest difference, with its sign; NaN where one is not a number.
    quantiles: of the sizes, by name.
    from_position: by the position where a range begins, to the next one's; ranges without tokens
    are left out.
    of_version: by the version of the weights that sampled a token.
    longest: of the longest response, of several the first.
    likely, unlikely: of the tokens that the trainer finds as likely as sampled ones are, and of
    those less likely.
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
