"""How partial rollouts flow on average: rounds of a step, responses that are cut and continued, and
their tokens.

Lengths are taken to be exponential of the mean that the plan is for, cut at the longest: a response
is longer than t tokens with probability exp(-t / mean), and a group of n is whole after t tokens
with (1 - exp(-t / mean))^n. Prompts that are begun together are a cohort; cohorts are followed by
the expected number of their groups, round for round, by the rule of
rollout/sources/partial_sampling.py, until a step is like the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

WARM_UP, COUNTED = 50, 100  # steps that are left out, and that means are taken over


@dataclass(frozen=True)
class PartialFlow:
    """Means, of a step.

    rounds: of a step. growing: responses that grow in a round.
    continued: responses that the step before has cut. carried: tokens that they have then.
    held: tokens that the growing responses of a round have at its end, together.
    """

    rounds: float
    growing: float
    continued: float
    carried: float
    held: float


@dataclass
class _Cohort:
    """Groups that were begun together, as expected numbers; `age` in rounds."""

    begun: float
    age: int = 0
    taken: float = 0.0


@cache
def partial_flow(
    groups: int, samples: int, under_way: int, tokens: int, mean: float, longest: int
) -> PartialFlow:
    """Flow of runs that take `groups` groups of `samples` responses a step, with `under_way` groups
    at a time.

    Args:
        tokens: that a response grows by in a round.
        mean, longest: tokens of a response.
    """

    def longer(age: int) -> float:
        """Share of the responses that are not whole after so many rounds."""
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
