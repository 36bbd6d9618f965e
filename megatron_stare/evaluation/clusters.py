"""The variance of a mean over prompts of which several may be one problem, and Student's quantile. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

PARTS = 200  # of Simpson's rule: 1e-9 of the 95 % quantile


def mean_of_problems(values: Sequence[float], problems: Sequence[int] | None = None) -> tuple[float, float, float]:
    """Mean of one value a prompt, its variance over problems, and the effective number of problems.

    With n_g prompts of problem g, N in all, and e_g the sum of their deviations from the mean:
    G = N² / Σ_g n_g² (Kish, Survey Sampling, 1965), the number of problems where each has as many
    prompts, and less where few of them have most; the variance of the mean is
    G/(G - 1) Σ_g e_g² / N² (Liang and Zeger, Biometrika 73, 1986, for problems of equal weight).

    Args:
        values: one a prompt, at least one.
        problems: the problem of each prompt; None: all are different.

    Returns:
        mean, variance (infinite for a single problem), G.
    """
    mean = fmean(values)
    sums: dict[int, float] = {}
    prompts: dict[int, int] = {}
    for problem, value in zip(problems or range(len(values)), values, strict=True):
        sums[problem] = sums.get(problem, 0.0) + value - mean
        prompts[problem] = prompts.get(problem, 0) + 1
    squared = len(values) ** 2
    count = squared / sum(n * n for n in prompts.values())
    if len(sums) == 1:
        return mean, math.inf, 1.0
    return mean, count / (count - 1) * math.fsum(e * e for e in sums.values()) / squared, count


@lru_cache(maxsize=1024)
def student_quantile(level: float, degrees: float) -> float:
    """The t for which |T| <= t has probability `level`, T being Student's with `degrees` of freedom.

    With t = √ν tan θ the probability is c ∫_0^θ cos^(ν-1), c = 2 Γ((ν + 1)/2) / (√π Γ(ν/2)). It is
    concave in θ, so that Newton's steps from 0 never overshoot.

    Args:
        level: in (0, 1); 0.95 for an interval of 95 %.
        degrees: ν, not necessarily whole; below 1 counts as 1.
    """
    nu = max(1.0, degrees)
    log_c = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2)
    c = 2 / math.sqrt(math.pi) * math.exp(log_c)
    angle = 0.0
    for _ in range(100):
        step = (level - c * _power_integral(angle, nu - 1)) / (c * math.cos(angle) ** (nu - 1))
        angle += step
        if abs(step) <= 1e-13 * angle:
            break
    return math.sqrt(nu) * math.tan(angle)


def _power_integral(angle: float, power: float) -> float:
    """The integral of cos^power from 0 to `angle`, by Simpson's rule."""
    values = [math.cos(angle * at / PARTS) ** power for at in range(PARTS + 1)]
    weighted = values[0] + 4 * math.fsum(values[1::2]) + 2 * math.fsum(values[2:-1:2]) + values[-1]
    return angle / PARTS / 3 * weighted
