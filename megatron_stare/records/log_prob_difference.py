"""Defines the records that summarise the differences between a rollout engine's log-probs and the
trainer's log-probs. A rank computes the differences for the tokens of which it holds the engine's
log-probs and the trainer's log-probs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Summary of the absolute log-prob differences of some tokens.

    `not_numbers`: the number of NaN differences.
    `largest_number`, `mean_number`: the largest and the mean of the differences that are not NaN.
        If all differences are NaN, `largest_number` and `mean_number` are 0.
    """

    tokens: int
    not_numbers: int
    largest_number: float
    mean_number: float

    @property
    def largest(self) -> float:
        """Largest absolute difference; NaN if any difference is NaN."""
        return math.nan if self.not_numbers else self.largest_number

    @property
    def mean(self) -> float:
        """Mean absolute difference; NaN if any difference is NaN."""
        return math.nan if self.not_numbers else self.mean_number


@dataclass(frozen=True)
class LogProbDifference:
    """Summary of the differences "log-prob of the engine minus log-prob of the trainer", in nats,
    over all tokens in a batch's loss mask.

    `everywhere`: summary of the log-prob differences for all tokens. If no rank has compared a
        token, the token's difference is NaN.
    `lowest`: the smallest signed difference; NaN if any difference is NaN.
    `quantiles`: quantiles of the absolute differences. The keys are names such as p90.
    `from_position`: dict with one summary of log-prob differences for each range of positions in
        the response. The key of each summary is the first position of the summary's range. Ranges
        without tokens are left out.
    `of_version`: one summary of log-prob differences for each weight version that sampled tokens.
        The keys of the dict are the weight versions.
    `longest`: summary of the log-prob differences in the longest response of the batch. If the
        batch has several longest responses of equal length, `longest` describes the first of them.
    `likely`: summary of the log-prob differences for tokens to which the trainer gives a
        probability of at least 1/1000.
    `unlikely`: summary of the log-prob differences for tokens to which the trainer gives a
        probability below 1/1000.
    `engine_nan`: the number of tokens whose log-prob from the engine is NaN.
    """

    everywhere: Sizes
    lowest: float
    quantiles: Mapping[str, float]
    from_position: Mapping[int, Sizes]
    of_version: Mapping[int, Sizes]
    longest: Sizes
    likely: Sizes
    unlikely: Sizes
    engine_nan: int = 0

    @property
    def largest(self) -> float:
        return self.everywhere.largest
