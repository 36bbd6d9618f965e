"""avg@k, pass@k and maj@k against every subset written out, and intervals against published
values."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest

from megatron_stare.evaluation.estimates import (
    majority_at_k,
    mean_of_problems,
    pass_at_k,
    student_quantile,
    wilson_interval,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples: int) -> None:
    for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
        subsets = list(itertools.combinations([1] * right + [0] * (samples - right), k))
        expected = Fraction(sum(map(any, subsets)), len(subsets))
        assert pass_at_k(right, samples, k) == pytest.approx(float(expected), abs=1e-15)


def test_pass_at_k_of_worked_numbers() -> None:
    assert pass_at_k(3, 10, 1) == 0.3
    # C(7, 5) of C(10, 5) hold none of the three
    assert pass_at_k(3, 10, 5) == pytest.approx(1 - 21 / 252)
    assert (pass_at_k(0, 32, 32), pass_at_k(1, 32, 32), pass_at_k(9, 32, 24)) == (0.0, 1.0, 1.0)
    # where a product of floats would drift, and a factorial overflow
    assert pass_at_k(1, 4096, 1) == 1 / 4096
    assert pass_at_k(2048, 4096, 1024) == 1.0


@pytest.mark.parametrize(("right", "samples", "k"), [(0, 4, 5), (0, 4, 0), (5, 4, 1), (-1, 4, 1)])
def test_pass_at_k_of_what_there_is_not(right: int, samples: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {right} right of {samples}"):
        pass_at_k(right, samples, k)


def majority_by_enumeration(answers: list[str | None], result: dict[str, float], k: int) -> float:
    """Over all subsets of k, the mean result of the answers that most of them give."""
    total, subsets = Fraction(0), list(itertools.combinations(answers, k))
    for subset in subsets:
        votes = Counter(answer for answer in subset if answer is not None)
        if votes:
            winners = [answer for answer, count in votes.items() if count == max(votes.values())]
            total += sum(Fraction(result[answer]) for answer in winners) / len(winners)
    return float(total / len(subsets))


@pytest.mark.parametrize(
    ("answers", "result"),
    [
        ("aab", {"a": 1.0, "b": 0.0}),
        ("aabb", {"a": 1.0, "b": 0.0}),  # a tie of all, split evenly
        # as many tie as there are
        ("abcdef", {"a": 1.0, "b": 0.0, "c": 0.0, "d": 0.0, "e": 0.0, "f": 0.0}),
        ("aaabbcc-", {"a": 0.0, "b": 1.0, "c": 0.0}),
        ("aaabbb--", {"a": 1.0, "b": 1.0}),  # two notations that are right
        ("aaaabbcd", {"a": 0.5, "b": 0.0, "c": 0.25, "d": 1.0}),
        ("a-------", {"a": 1.0}),  # who gives no answer does not outvote who does
        ("--------", {}),
    ],
)
def test_the_majority_is_that_of_every_subset(answers: str, result: dict[str, float]) -> None:
    given = [None if answer == "-" else answer for answer in answers]
    votes = Counter(answer for answer in given if answer is not None)
    classes = [(count, result[answer]) for answer, count in votes.items()]
    for k in range(1, len(given) + 1):
        expected = majority_by_enumeration(given, result, k)
        assert majority_at_k(classes, len(given), k) == pytest.approx(expected, abs=1e-12), k


def test_the_majority_of_all_is_the_largest_class_or_a_share_of_a_tie() -> None:
    assert majority_at_k([(3, 0.0), (4, 1.0), (1, 0.0)], 8, 8) == 1.0
    assert majority_at_k([(4, 0.0), (3, 1.0), (1, 0.0)], 8, 8) == 0.0
    assert majority_at_k([(3, 1.0), (3, 0.0), (2, 0.0)], 8, 8) == 0.5


def test_the_majority_of_many_stays_a_probability() -> None:
    """512 responses, half of them alone with their answer: nothing overflows, and 32 of 512 nearly
    always agree."""
    lone = [(1, 0.0)] * 256
    assert majority_at_k([(256, 1.0), *lone], 512, 32) == pytest.approx(1.0, abs=1e-6)
    for half, k in ((256, 32), (50, 95)):
        # by symmetry
        assert majority_at_k([(half, 1.0), (half, 0.0)], 2 * half, k) == pytest.approx(
            0.5, abs=1e-9
        )
    assert majority_at_k([(256, 1.0), *lone], 512, 1) == pytest.approx(0.5, abs=1e-9)
    assert 0.0 < majority_at_k([(200, 1.0), (312, 0.0)], 512, 255) < 1e-3


def test_the_majority_of_what_there_is_not() -> None:
    for classes, samples, k in (([(3, 1.0)], 2, 1), ([(1, 1.0)], 2, 3), ([(1, 1.0)], 2, 0)):
        with pytest.raises(ValueError, match=f"maj@{k}"):
            majority_at_k(classes, samples, k)


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(right: int, of: int, low: float, high: float) -> None:
    results = [1.0] * right + [0.0] * (of - right)
    assert wilson_interval(results) == pytest.approx((right / of, low, high), abs=5.1e-5)
    flipped = wilson_interval([1 - result for result in results])
    assert flipped == pytest.approx((1 - right / of, 1 - high, 1 - low), abs=5.1e-5)


def test_prompts_of_one_problem_are_one() -> None:
    """Each result twice says no more than once; as results of their own they would seem to."""
    results = [1.0, 0.0, 0.0, 1.0, 1.0, 0.25]
    once = wilson_interval(results)
    numbers = [number for number in range(6) for _ in range(2)]
    twice = [result for result in results for _ in range(2)]
    assert wilson_interval(twice, numbers) == pytest.approx(once)
    _, low, high = wilson_interval(twice)
    assert high - low < 0.8 * (once[2] - once[1])


def test_shares_of_several_responses_narrow_the_interval_only_as_far_as_they_agree() -> None:
    """In float64: m = 1 + p (1 - p) / var of the mean, its excess over 8 problems by the least of
    the factors."""
    results = [0.25, 0.5, 0.75, 0.5, 1.0, 0.0, 0.5, 0.5]
    mean, low, high = wilson_interval(results)
    m = 1 + 0.25 / (sum((r - 0.5) ** 2 for r in results) / 8 / 7)
    z, t = 1.959963984540054, 2.364624251592784  # of 7 degrees of freedom
    assert (z / t) ** 2 < 8 * 0.5 / 5 < 1
    m = 8 + (z / t) ** 2 * (m - 8)
    half = z / (1 + z * z / m) * math.sqrt(0.25 / m + z * z / (4 * m * m))
    assert (mean, low, high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-12)
    whole = wilson_interval([1.0, 0.0] * 4)
    assert high - low < whole[2] - whole[1]


def test_an_interval_of_equal_results_is_as_wide_as_its_problems_are_few() -> None:
    few, many = wilson_interval([0.3] * 5), wilson_interval([0.3] * 500)
    assert few[1] < 0.1 < 0.25 < many[1] < 0.3 < many[2] < 0.35 < 0.6 < few[2]
    assert wilson_interval([1.0])[1] == pytest.approx(0.2065, abs=1e-4)


def test_near_saturation_the_interval_is_that_of_as_many_results_of_0_or_1() -> None:
    """One share just below 1 among ones says no more of other problems than a one does."""
    whole = wilson_interval([1.0] * 30)
    assert whole[1:] == pytest.approx((30 / (30 + 1.959963984540054**2), 1.0), abs=1e-12)
    nearly = wilson_interval([1.0] * 29 + [1 - 1e-5])
    assert nearly[1:] == pytest.approx(whole[1:], abs=0.02)  # was [0.999998, 0.99999994]
    assert wilson_interval([0.0] * 29 + [1e-5])[1:] == pytest.approx((0.0, 1 - whole[1]), abs=0.02)
    # p = 0.99: 30 * 0.01 / 5 = 0.06 of the excess counts
    results = [1.0] * 28 + [0.85, 0.85]
    mean, low, high = wilson_interval(results)
    m = 1 + 0.99 * 0.01 / (sum((r - 0.99) ** 2 for r in results) / 30 / 29)
    m = 30 + 0.06 * (m - 30)
    z = 1.959963984540054
    half = z / (1 + z * z / m) * math.sqrt(0.99 * 0.01 / m + z * z / (4 * m * m))
    assert (high - low) / 2 == pytest.approx(half, abs=1e-12)
    assert mean == pytest.approx(0.99)


def test_in_the_middle_of_many_problems_the_spread_alone_counts() -> None:
    results = [0.4, 0.6] * 500
    _, low, high = wilson_interval(results)
    assert high - low == pytest.approx(2 * 1.959963984540054 * 0.1 / math.sqrt(1000), rel=0.01)


def test_few_problems_that_have_most_prompts_are_the_effective_number() -> None:
    """N = 8 in problems of 4, 2, 1, 1: G = 64/22. In exact fractions."""
    results = [Fraction(n, 4) for n in (3, 2, 4, 1, 2, 2, 4, 0)]
    problems = [0, 0, 0, 0, 1, 1, 2, 3]
    mean = sum(results) / 8
    sums = [
        sum(r - mean for r, g in zip(results, problems, strict=True) if g == each)
        for each in range(4)
    ]
    count = Fraction(64, 22)
    variance = count / (count - 1) * sum(e * e for e in sums) / 64
    found = mean_of_problems([float(r) for r in results], problems)
    assert found == pytest.approx((float(mean), float(variance), float(count)), rel=1e-12)
    assert mean_of_problems([0.0, 1.0], [7, 7])[1:] == (math.inf, 1.0)
    assert mean_of_problems([0.0, 1.0, 1.0], None)[1:] == pytest.approx((2 / 3 / 6, 3))


@pytest.mark.parametrize(
    ("level", "degrees", "quantile"),
    # Fisher and Yates' tables; the last is the normal's
    [
        (0.95, 1, 12.706205),
        (0.95, 2, 4.302653),
        (0.95, 4, 2.776445),
        (0.95, 11, 2.200985),
        (0.95, 29, 2.045230),
        (0.99, 5, 4.032143),
        (0.5, 3, 0.764892),
        (0.95, 1e7, 1.959964),
        (0.95, 0.3, 12.706205),
        (0.999, 1, 636.619249),
        (0.999, 2, 31.599055),
    ],
)
def test_students_quantile(level: float, degrees: float, quantile: float) -> None:
    assert student_quantile(level, degrees) == pytest.approx(quantile, abs=1e-6)


@pytest.mark.parametrize("results", [[], [1.5], [-0.1, 0.5], [math.nan]])
def test_an_interval_of_what_is_no_share(results: list[float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        wilson_interval(results)
