"""The verifier of signs: the attempt after the last 'wait' counts, and nothing but an attempt may
stand there."""

from __future__ import annotations

import pytest

from megatron_stare.rewards.signs_verifier import answer_start, verify
from megatron_stare.rewards.verifier import make_verifier

PROBLEM = "33 8 5 2 = 38"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("+8 -5 +2", 1.0),
        (" +8 41 -5 36 +2 38 \n", 1.0),
        ("+8 41 -5 +2 38", 1.0),
        ("+8 7 -5 7 +2 7", 1.0),  # the signs count, not the reckoning
        ("+8 +5 +2 wait -8 -5 -2 wait +8 -5 +2", 1.0),
        ("wait +8 -5 +2", 1.0),
        ("+8 -5 +2 wait +8 +5 +2", 0.0),
        ("+8 -5 +2 wait", 0.0),
        ("", 0.0),
        ("wait", 0.0),
        ("+8 +5 -2", 0.0),
        ("-5 +8 +2", 0.0),  # right total, wrong order
        ("+5", 0.0),  # right total, made up
        ("+8 -5 +1 +1", 0.0),
        ("+8 -5 +2 +0", 0.0),
        ("+08 -5 +2", 0.0),
        ("8 -5 +2", 0.0),
        ("+8 -5 +2 38 38", 0.0),
        ("33 +8 -5 +2", 0.0),
        ("+8 -5 +2 =", 0.0),
        ("+8-5+2", 0.0),
        ("+8 41 -5 36 +2 ３８", 0.0),
        ("+8 " + "9" * 5000 + " -5 +2", 1.0),  # more digits than int() reads
        ("+" + "9" * 5000 + " -5 +2", 0.0),
        ("+8 " * 20_000, 0.0),
    ],
)
def test_reward(response, reward):
    assert verify(response, PROBLEM) == reward


def test_operands_and_totals_of_other_problems():
    assert verify("-9 1 -1 0 -2", "10 9 1 2 = -2") == 1.0
    assert verify("+2 +3", "1 2 3 = 6") == 1.0
    assert verify("+2 -3", "1 2 3 = 6") == 0.0


@pytest.mark.parametrize(
    "answer", ["38", "33 = 38", "33 8 5 2 = 38 :", "33 8 5 2 38", "33 8 x 2 = 38"]
)
def test_an_answer_that_is_no_problem_is_an_error_not_a_zero(answer):
    with pytest.raises(ValueError, match="is no problem"):
        verify("+8 -5 +2", answer)


@pytest.mark.parametrize(
    ("response", "start"),
    [
        ("+8 -5", 0),
        ("  +8", 2),
        ("+8 41 wait  -8 25 ", 12),
        ("+8 wait", -1),
        ("", -1),
        ("7 +8", -1),
        ("+8 x", -1),
    ],
)
def test_where_the_answer_stands(response, start):
    assert answer_start(response) == start


def test_the_name_finds_it_and_its_known_answers_hold():
    assert make_verifier("signs") is verify
