"""Predicts averages for a run with partial rollouts: the number of rounds per step, the number of
responses that are cut and later continued, and the number of tokens of these responses.

Response lengths are assumed to be exponentially distributed with the planned mean, and truncated at
the maximum. For every t below the maximum length, a response is longer than t tokens with
probability exp(-t / mean). The probability that all n responses of a group have at most t tokens is
therefore (1 - exp(-t / mean))^n. Groups that begin in the same step form a cohort. The simulation
computes, round by round, how many groups of each cohort are complete on average. The simulation
leaves out the first WARM_UP steps and averages over the next COUNTED steps. The rule in
rollout/sources/partial_sampling.py decides which complete groups are taken for training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

WARM_UP, COUNTED = 50, 100  # simulated steps to skip, and to average over


@dataclass(frozen=True)
class PartialFlow:
    """Result of the simulation of a run with partial rollouts. Every field is an average over
    simulated steps or over simulated rounds.

    `rounds`: rounds per step.
    `growing`: number of responses that get new tokens in a round.
    `continued`: number of incomplete responses that a step takes over from the previous step.
    `carried`: total length, in tokens, of the incomplete responses that a step takes over from the
        previous step.
    `held`: total length, in tokens, of the responses that get new tokens in a round. The lengths at
        the end of the round are added up, so tokens from earlier rounds are included.
    """

    rounds: float
    growing: float
    continued: float
    carried: float
    held: float


@dataclass
class _Cohort:
    """The prompt groups that were begun in one step. The fields `begun` and `taken` are expected
    values, so these numbers can be fractions.

    `begun`: number of groups that were begun.
    `age`: number of rounds since the groups were begun.
    `taken`: number of the cohort's groups on which the run has already trained.
    """

    begun: float
    age: int = 0
    taken: float = 0.0


@cache
def partial_flow(
    groups: int, samples: int, under_way: int, tokens: int, mean: float, longest: int
) -> PartialFlow:
    """Simulates the steps of a run with partial rollouts, round by round. Returns averages over
    COUNTED simulated steps and over the rounds of these steps. The first WARM_UP simulated steps do
    not count.

    Args:
        groups: number of prompt groups on which the run trains in each step.
        samples: number of responses per prompt group.
        under_way: number of groups in flight at a time.
        tokens: number of tokens by which a response grows in a round.
        mean, longest: mean and maximum number of tokens of a response.
    """

    def longer(age: int) -> float:
        """Returns the fraction of responses that are incomplete after `age` rounds."""
        return math.exp(-age * tokens / mean) if age * tokens < longest else 0.0

    def whole(cohort: _Cohort) -> float:
        return cohort.begun * (1 - longer(cohort.age)) ** samples - cohort.taken

    cohorts: list[_Cohort] = []
    rounds = growing = continued = carried = held = 0.0
    for step in range(WARM_UP + COUNTED):
        counts = step >= WARM_UP
        for each in cohorts:
            cut = each.begun * samples * longer(each.age)
            continued += counts * cut
            carried += counts * cut * each.age * tokens
        cohorts.append(_Cohort(under_way - sum(each.begun - each.taken for each in cohorts)))
        done = 0.0
        while done < groups * (1 - 1e-9):
            for each in cohorts:
                grew = each.begun * samples * longer(each.age)
                growing += counts * grew
                held += counts * grew * (each.age + 1) * tokens
                each.age += 1
            rounds += counts
            done = sum(map(whole, cohorts))
        room = float(groups)
        for each in cohorts:  # the oldest first
            gone = min(room, whole(each))
            each.taken, room = each.taken + gone, room - gone
        cohorts = [each for each in cohorts if each.begun - each.taken > 1e-9]
    return PartialFlow(
        rounds / COUNTED, growing / rounds, continued / COUNTED, carried / COUNTED, held / rounds
    )
