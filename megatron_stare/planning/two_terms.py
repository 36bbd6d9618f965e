"""Two rates of one phase from what several runs took: seconds = inverse x ideal + times x other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

APART = 1.25  # of two runs' parts, before they tell one term from the other


@dataclass(frozen=True)
class Seen:
    """Of one run.

    ideal: seconds of the phase where its rate is 1. other: seconds of one unit of the other term.
    seconds: that were measured; above 0.
    """

    ideal: float
    other: float
    seconds: float


def solve(runs: Sequence[Seen], least: float) -> tuple[float, float]:
    """(inverse, times) of the least squares of the errors, each as a share of what that run took.

    With one run, or where the runs' parts, other over ideal, are not `APART` from each other, there is no telling the
    terms apart, and times is 0. Neither is below 0, and beside another term the inverse is not below `least`: alone it
    may be, and says that the runs were faster than the rate that it is a share of.
    """
    ideal, other = np.array([(run.ideal / run.seconds, run.other / run.seconds) for run in runs]).T
    ones = np.ones(len(runs))
    alone = _one(ideal, ones)
    ratios = [run.other / run.ideal for run in runs]
    if alone <= least or max(ratios) < APART * min(ratios) or not max(ratios):
        return alone, 0.0
    inverse, times = np.linalg.lstsq(np.column_stack((ideal, other)), ones, rcond=None)[0]
    if times < 0:
        return alone, 0.0
    if inverse < least:
        return least, max(_one(other, ones - least * ideal), 0.0)
    return float(inverse), float(times)


def _one(column: np.ndarray, target: np.ndarray) -> float:
    return float(column @ target / (column @ column))
