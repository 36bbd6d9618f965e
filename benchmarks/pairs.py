"""Ratios of things that were done by turns."""

from __future__ import annotations

import math
import statistics
from typing import Any


def spread(one: list[float], other: list[float]) -> dict[str, Any]:
    """Ratios pair by pair: their median, the order statistics that enclose the true median with at
    least 95 % (None below 6 pairs, whose whole range encloses it less often), their quartiles; and
    the ratio of the two quickest."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    outer = left_out(len(ratios))
    enclosing = None
    if outer is not None:
        enclosing = [round(ratios[outer], 4), round(ratios[len(ratios) - 1 - outer], 4)]
    return {
        "median": round(middle, 4),
        "median_95": enclosing,
        "quartiles": [round(low, 4), round(high, 4)],
        "quickest": round(min(one) / min(other), 4),
    }


def left_out(count: int) -> int | None:
    """Returns how many of `count` sorted values may be left out at either end, so that the rest
    enclose the true median with at least 95 %; None if all do not."""
    beyond, outer = 0, None
    for number in range(count // 2):  # each value is below the true median with probability 1/2
        beyond += 2 * math.comb(count, number)
        if beyond > 0.05 * 2**count:
            break
        outer = number
    return outer
