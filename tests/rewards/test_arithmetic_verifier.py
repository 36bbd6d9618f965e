"""The arithmetic verifier: only the integer that ends the response counts."""

from __future__ import annotations

import pytest

from megatron_stare.rewards.arithmetic_verifier import answer_start, verify


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("14+27=41;41+58=99", 1.0),
        ("=99", 1.0),
        ("= 99 \n", 1.0),
        ("=099", 1.0),
        ("99", 0.0),
        ("", 0.0),
        ("=", 0.0),
        ("=99;", 0.0),
        ("=99=", 0.0),
        ("=98", 0.0),
        ("=-99", 0.0),
        ("=9 9", 0.0),
        ("=99.0", 0.0),
        ("=９９", 0.0),
        ("=" + "9" * 5000, 0.0),  # more digits than int() reads
        ("=98;=99", 1.0),
    ],
)
def test_reward(response, reward):
    assert verify(response, "99") == reward


def test_zero_and_negative_answers():
    assert verify("5-5=000", "0") == 1.0
    assert verify("1-2=-1", "-1") == 1.0


def test_an_answer_that_is_no_integer_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="ninety"):
        verify("=99", "ninety")


@pytest.mark.parametrize(
    ("response", "start"),
    [("14+27=41;41+58=99", 14), ("=99 \n", 0), ("=98;=99", 4), ("99", -1), ("=99;", -1), ("=", -1)],
)
def test_where_the_answer_stands(response, start):
    assert answer_start(response) == start
