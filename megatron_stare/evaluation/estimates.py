"""Estimates avg@k, pass@k and maj@k of one problem from its n sampled responses. `wilson_interval`
computes a confidence interval for the mean of the results of all prompts. All functions are pure.

Each estimate is an average over all ways to choose k of the n responses. Each estimate is therefore
unbiased: the expected value of the estimate is the expected value of the metric for k new
responses. The order of the n responses does not affect the estimates. Several prompts can contain
the same problem, so the variance of a mean is computed from differences between problems, not
between prompts. docs/evaluation.md defines the estimates in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

PARTS = 200  # steps of Simpson's rule: relative error 1e-9 in the 95 % quantile


def pass_at_k(right: int, samples: int, k: int) -> float:
    """Returns the probability that at least one of k responses is right. If c of the n sampled
    responses are right, the probability is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv
    2107.03374, eq. 1). The computation uses exact integers until the final division.

    Raises:
        ValueError: unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {right} right of {samples} responses")
    every = math.comb(samples, k)
    return (every - math.comb(samples - right, k)) / every


def majority_at_k(classes: Sequence[tuple[int, float]], samples: int, k: int) -> float:
    """Returns the expected result of a majority vote among k responses. If several answers have the
    most votes, one of these answers is drawn at random.

    The k responses are drawn without replacement from the n sampled responses. Of the n responses,
    c_j responses give answer j. The vote has the result r_j if answer j wins. Let A(j, i) be the
    event that answer j gets exactly i votes and no other answer gets more than i votes. If the
    event A(j, i) occurs, let T be the number of other answers that also get i votes. Answer j then
    wins the vote with probability 1 / (1 + T). To obtain the expected result of the vote, sum
    r_j * P(A(j, i)) * E[1 / (1 + T) | A(j, i)] over all answers j and all i from 1 to k. A response
    without an answer has no vote. If none of the k responses has an answer, the result is 0.

    Args:
        classes: the pair (c_j, r_j) for every answer j, where r_j in [0, 1] is the result of the
            answer.
        samples: the number n of responses, including responses without an answer.

    Raises:
        ValueError: unless 1 <= k <= n and the classes contain at most n responses in total.
    """
    voting = sum(count for count, _ in classes)
    if not (1 <= k <= samples and voting <= samples):
        raise ValueError(f"maj@{k} of {voting} answers of {samples} responses")
    if k == samples:
        most = max((count for count, _ in classes), default=0)
        return fmean(result for count, result in classes if count == most) if most else 0.0
    # Drawing each response with probability k/n, conditioned on k draws in total, equals drawing k
    # without replacement.
    drawn = [_binomial(count, k / samples) for count, _ in classes]
    silent = _binomial(samples - voting, k / samples)
    total = 0.0
    for number, (count, result) in enumerate(classes):
        if result:
            others = [each for at, each in enumerate(drawn) if at != number]
            wins = (
                drawn[number][a] * _not_beaten(others, silent, a, k)
                for a in range(1, min(count, k) + 1)
            )
            total += result * math.fsum(wins)
    # rounding may exceed 1; NaN stays NaN
    return min(float(total / _binomial(samples, k / samples)[k]), 1.0)


def _not_beaten(
    others: Sequence[NDArray[np.float64]], silent: NDArray[np.float64], a: int, k: int
) -> float:
    """Returns the sum of the weights of all possible draws. A class is the set of all sampled
    responses with the same answer. A draw consists of `k - a` responses. Each response in a draw
    belongs to a class in `others`, or has no answer (`silent`). A draw contains at most `a`
    responses of each class in `others`. Two draws count as the same draw if both contain equally
    many responses of each class in `others`.

    The weight of a draw is a product of factors, divided by 1 + T. The product has one factor for
    each class in `others`, and one factor for the responses without an answer. The factor of a
    class is entry i of the class's array, where i is the number of its responses in the draw. T is
    the number of tied classes. A class in `others` is tied if the draw contains exactly `a`
    responses of this class.

    Args:
        others: one array [c + 1] of factors for each class, where c is the number of responses in
            the class. Entry i is the factor for a draw that contains exactly i responses of the
            class.
        silent: an array of the same form for the responses without an answer.
    """
    rest, tied = k - a, sum(len(each) > a for each in others)
    # indexed by classes that tie, and by responses drawn
    ways = np.zeros((min(tied, rest // a) + 1, rest + 1))
    ways[0, : len(silent)] = silent[: rest + 1]
    for each in others:
        grown = np.zeros_like(ways)
        for count, weight in enumerate(each[: min(a, rest + 1)]):  # fewer than a
            grown[:, count:] += weight * ways[:, : rest + 1 - count]
        if len(each) > a and a <= rest:
            grown[1:, a:] += each[a] * ways[:-1, : rest + 1 - a]
        ways = grown
    return float((ways[:, rest] / np.arange(1, len(ways) + 1)).sum())


def _binomial(n: int, p: float) -> NDArray[np.float64]:
    """Returns an array of n + 1 probabilities. Entry i is the probability of i successes in n
    trials. The probability `p` of a success must be above 0 and below 1."""
    log_n = math.lgamma(n + 1)
    logs = [
        log_n
        - math.lgamma(i + 1)
        - math.lgamma(n - i + 1)
        + i * math.log(p)
        + (n - i) * math.log1p(-p)
        for i in range(n + 1)
    ]
    return np.exp(np.array(logs))


def wilson_interval(
    results: Sequence[float], problems: Sequence[int] | None = None, level: float = 0.95
) -> tuple[float, float, float]:
    """Returns the mean of results in [0, 1], and Wilson's score interval (JASA 22, 1927) for the
    mean. `results` contains one result per prompt. The interval takes into account that several
    prompts can contain the same problem.

    Let p be the mean of the N results, z the (1 + level)/2 quantile of the standard normal
    distribution, and m an effective number of results. The interval is (p + z²/2m ± z √(p (1 - p)/m
    + z²/4m²)) / (1 + z²/m), as for survey samples (Korn and Graubard, Survey Methodology 24, 1998).
    The effective number of results is m = 1 + p (1 - p) / v. The function `mean_of_problems`
    computes v, an estimate of the variance of p. Let μ be the true mean, which is the expected
    value of p. On average, the product p (1 - p) is smaller than the product μ (1 - μ). The
    expected difference between the two products is the variance of p. The number v is an estimate
    of this variance. In the formula m = 1 + p (1 - p) / v, the summand 1 corrects the bias of the
    product p (1 - p). If every result is 0 or 1, and no two prompts contain the same problem, the
    effective number m equals the number N of results, and the interval is exactly Wilson's score
    interval.

    A prompt's result can be the share of right responses among several responses to the prompt. The
    share of right responses to a prompt varies less than the result of a single response, which is
    0 or 1. If the results are such shares, the variance v is smaller, and the effective number m of
    results is larger. The number m is then larger than the effective number G of problems, which
    `mean_of_problems` computes. The estimate of the difference m - G is unreliable in two cases. In
    the first case, there are few problems. In the second case, p is near 0 or 1. Most results are
    then exactly 0 or 1, and the estimate depends mainly on the few results between 0 and 1. If m is
    larger than G, the function therefore reduces m. The function multiplies the difference m - G by
    a factor, and adds the product to G. The factor is the smaller of the weight w and the ratio
    (z/t)². The weight w is min(1, G min(p, 1 - p)/5), because a normal approximation needs five
    right and five wrong results. The number t is the (1 + level)/2 quantile of Student's t
    distribution with G - 1 degrees of freedom. If all results are equal, the function uses G as the
    effective number m. A simulation in tests/evaluation/test_coverage.py measures how often the
    interval contains the true mean.

    Args:
        problems: the problem of each prompt; None: no two prompts share a problem.

    Returns:
        mean, low, high.

    Raises:
        ValueError: there are no results, or a result is outside [0, 1].
    """
    if not results or not all(0 <= result <= 1 for result in results):
        raise ValueError("an interval needs results, between 0 and 1")
    mean, variance, count = mean_of_problems(results, problems)
    spread = mean * (1 - mean)
    z = NormalDist().inv_cdf((1 + level) / 2)
    effective = count
    if variance > 1e-15 and spread > 0:  # more than rounding
        effective = 1 + spread / variance
    if effective > count:
        saturation = count * min(mean, 1 - mean) / 5
        few = (z / student_quantile(level, count - 1)) ** 2
        effective = count + min(1.0, saturation, few) * (effective - count)
    scale = 1 + z * z / effective
    middle = (mean + z * z / (2 * effective)) / scale
    half = z * math.sqrt(spread / effective + z * z / (4 * effective * effective)) / scale
    return mean, max(0.0, middle - half), min(1.0, middle + half)


def mean_of_problems(
    values: Sequence[float], problems: Sequence[int] | None = None
) -> tuple[float, float, float]:
    """Takes one value per prompt. Returns the mean of the values, the variance of this mean, and
    the effective number of problems.

    Problem g has n_g of the N prompts, and e_g is the sum of (value - mean) over the prompts of
    problem g. The effective number of problems is G = N² / Σ_g n_g² (Kish, Survey Sampling, 1965).
    If all problems have the same number of prompts, G is the number of problems. If some problems
    have more prompts than others, G is smaller than the number of problems. The variance of the
    mean is G/(G - 1) Σ_g e_g² / N². If all problems have the same number of prompts, the formula
    for the variance is the formula of Liang and Zeger (Biometrika 73, 1986).

    Args:
        values: one value per prompt, at least one value.
        problems: the problem of each prompt; None: no two prompts share a problem.

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
    """Returns a two-sided quantile of Student's t distribution. A random variable T that has this
    distribution lies between -t and t with probability `level`, where t is the returned number.

    With t = √ν tan θ, the probability that T lies between -t and t is c ∫_0^θ cos^(ν-1), where c =
    2 Γ((ν + 1)/2) / (√π Γ(ν/2)). The probability is a concave function of θ, so Newton's method
    never overshoots if it starts at θ = 0.

    Args:
        level: in (0, 1); 0.95 for an interval of 95 %.
        degrees: the number ν of degrees of freedom, not necessarily an integer. Values below 1
            count as 1.
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
    """Integrates cos^power from 0 to `angle` by Simpson's rule."""
    values = [math.cos(angle * at / PARTS) ** power for at in range(PARTS + 1)]
    weighted = values[0] + 4 * math.fsum(values[1::2]) + 2 * math.fsum(values[2:-1:2]) + values[-1]
    return angle / PARTS / 3 * weighted
