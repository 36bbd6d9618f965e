"""Two terms of what runs took, told apart where the runs can tell them."""

from __future__ import annotations

import pytest

from megatron_stare.planning.calibrate import Seen, solve


def runs(*parts: tuple[float, float], inverse: float = 2.0, times: float = 3.0) -> list[Seen]:
    return [Seen(ideal, other, inverse * ideal + times * other) for ideal, other in parts]


def test_runs_of_other_parts_tell_the_terms_apart() -> None:
    assert solve(runs((1.0, 0.1), (4.0, 0.2)), 1.0) == pytest.approx((2.0, 3.0))
    assert solve(runs((1.0, 0.1), (4.0, 0.2), (9.0, 0.3)), 1.0) == pytest.approx((2.0, 3.0))


def test_each_run_counts_by_its_share_of_error() -> None:
    """No two terms explain these three runs, and the long run does not outweigh the others: errors
    are equal shares."""
    seen = [Seen(1.0, 1.0, 4.0), Seen(1.0, 2.0, 8.0), Seen(100.0, 100.0, 600.0)]
    inverse, times = solve(seen, 0.0)
    # columns over seconds: (1/4, 1/4), (1/8, 1/4), (1/6, 1/6); the normal equations by hand
    a, b, d = 1 / 16 + 1 / 64 + 1 / 36, 1 / 16 + 1 / 32 + 1 / 36, 1 / 16 + 1 / 16 + 1 / 36
    e, f = 1 / 4 + 1 / 8 + 1 / 6, 1 / 4 + 1 / 4 + 1 / 6
    assert inverse == pytest.approx((e * d - b * f) / (a * d - b * b))
    assert times == pytest.approx((a * f - b * e) / (a * d - b * b))


@pytest.mark.parametrize(
    "parts", [[(1.0, 0.1)], [(1.0, 0.1), (4.0, 0.4)], [(1.0, 0.1), (4.0, 0.45)], [(1.0, 0.0)] * 2]
)
def test_runs_of_the_same_parts_do_not(parts: list[tuple[float, float]]) -> None:
    seen = [Seen(ideal, other, 5.0 * ideal) for ideal, other in parts]
    assert solve(seen, 1.0) == (pytest.approx(5.0), 0.0)


def test_no_term_is_below_its_bound() -> None:
    seen = [Seen(1.0, 0.1, 2.0), Seen(4.0, 0.2, 10.0)]  # slower where less of it is the other term
    assert solve(seen, 1.0) == (pytest.approx((1 / 2 + 4 / 10) / (1 / 4 + 16 / 100)), 0.0)
    pinned = runs((1.0, 0.5), (2.0, 4.0), inverse=0.5)
    inverse, times = solve(pinned, 1.0)
    assert inverse == 1.0
    first, second = 0.5 / 2.0, 4.0 / 13.0
    assert times == pytest.approx(
        (first * (1 - 1 / 2.0) + second * (1 - 2 / 13.0)) / (first**2 + second**2)
    )


def test_runs_faster_than_the_rate_say_so() -> None:
    assert solve(runs((1.0, 0.1), (4.0, 0.2), inverse=0.3, times=0.1), 1.0)[0] < 1
