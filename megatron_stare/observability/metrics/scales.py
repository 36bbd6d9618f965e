"""Prepares numbers for charts. The functions place tick marks at round numbers, turn values into
short labels, smooth series, and reduce the number of points of long series.

`report/charts.py` and `figures.py` use this module. The module does not depend on SVG or HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Points = list[tuple[float, float]]  # (step, value); a NaN value is a gap in the line


def nice_ticks(low: float, high: float, count: int = 5, integer: bool = False) -> list[float]:
    """Returns about `count` tick marks that cover the range from `low` to `high`. The distance
    between tick marks is 1, 2 or 5 times a power of ten."""
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    if integer:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    decimals = 12 - math.floor(math.log10(step))  # for any size of the step
    return [round(i * step, decimals) for i in range(first, last + 1)]


def tick_label(value: float, step: float) -> str:
    """Formats a tick's label with as many decimals as the spacing of the ticks needs, e.g. 0.25,
    1,200, 15k, 2e-5."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000 and step >= 100:
        return f"{value / 1000:,.{0 if step >= 1000 else 1}f}k"
    if step < 1e-4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


def short(value: float | None, digits: int = 3) -> str:
    """Formats a value with `digits` significant digits and thousands separators. Returns an en dash
    if there is no value."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4:
        return f"{value:.{digits}g}"
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def smooth(values: Sequence[float]) -> list[float]:
    """Smooths a series with a Gaussian kernel whose standard deviation is a sixtieth of the series'
    length. A missing value stays missing and does not lower the smoothed values beside it.

    The kernel is centred, because a trailing average would show every change of direction too late.
    """
    x = np.asarray(values, dtype=float)
    sigma = max(1.0, len(x) / 60)
    reach = min(int(3 * sigma), max(0, (len(x) - 1) // 2))
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    known = np.isfinite(x)
    weight = np.convolve(known.astype(float), kernel, mode="same")
    total = np.convolve(np.where(known, x, 0.0), kernel, mode="same")
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(known, total / weight, np.nan).tolist()


def thin(points: Points, limit: int = 700) -> Points:
    """Reduces a series to about `limit` points with the same outline. Divides the series into
    buckets of consecutive points, and keeps at most three points of each bucket: the lowest point,
    the highest point and the first point without a finite value."""
    if len(points) <= limit:
        return points
    size = math.ceil(2 * len(points) / limit)
    kept: Points = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [p for p in bucket if math.isfinite(p[1])]
        chosen = (
            {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])} if finite else set()
        )
        gap = [p for p in bucket if not math.isfinite(p[1])][:1]
        kept += sorted([*chosen, *gap], key=lambda p: p[0])
    return kept


def intervals_on(steps: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns pairs (begin, end), one for each interval of steps in which a 0/1 series is 1. Each
    interval begins half a step before its first step and ends half a step after its last step."""
    found: list[tuple[float, float]] = []
    for step, value in zip(steps, values, strict=True):
        if not value >= 0.5:
            continue
        if found and step - 0.5 <= found[-1][1]:
            found[-1] = (found[-1][0], step + 0.5)
        else:
            found.append((step - 0.5, step + 0.5))
    return found
