"""Ratios of things that were done by turns."""

from __future__ import annotations

import statistics
from typing import Any


def spread(one: list[float], other: list[float]) -> dict[str, Any]:
    """Ratios pair by pair: their median, the order statistics that enclose the true median with 95
    %, their quartiles; and the ratio of the two quickest."""
    ratios = sorted(a / b for a, b in zip(one, other, strict=True))
    count = len(ratios)
    outer = max(int(count / 2 - 0.98 * count**0.5), 0)
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "median": round(middle, 4),
        "median_95": [round(ratios[outer], 4), round(ratios[count - 1 - outer], 4)],
        "quartiles": [round(low, 4), round(high, 4)],
        "quickest": round(min(one) / min(other), 4),
    }
