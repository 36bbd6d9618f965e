"""The verifier of signs: those after the last 'wait' count, and nothing but an attempt may stand there."""

from __future__ import annotations

import pytest

from megatron_stare.rewards.signs_verifier import answer_start, verify
from megatron_stare.rewards.verifier import make_verifier

PROBLEM = "45 8 5 2 = 50"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("+ - +", 1.0),
        ("+-+", 1.0),
        (" + 53 - 48 + 50 \n", 1.0),
        ("+ 53 - + 50", 1.0),
        ("+ 7 - 7 + 7", 1.0),  # the signs count, not the reckoning
        ("+ + + wait - - - wait + - +", 1.0),
        ("+ - + wait + + +", 0.0),
        ("+ - + wait", 0.0),
        ("wait + - +", 1.0),
        ("", 0.0),
        ("wait", 0.0),
        ("+ + -", 0.0),
        ("+ -", 0.0),
        ("+ - + +", 0.0),
        ("+ - + 50 50", 0.0),
        ("50 + - +", 0.0),
        ("+ - + =", 0.0),
        ("+ - + so", 0.0),
        ("+ 53 - 48 + ５０", 0.0),
        ("+ " + "9" * 5000 + " - +", 1.0),  # more digits than int() reads
        ("+" * 20_000, 0.0),
    ],
)
def test_reward(response, reward):
    assert verify(response, PROBLEM) == reward


def test_operands_and_totals_of_other_problems():
    assert verify("- 1 - 0 - 2", "10 9 1 2 = -2") == 1.0
    assert verify("+ +", "1 2 3 = 6") == 1.0
    assert verify("+ -", "1 2 3 = 6") == 0.0


@pytest.mark.parametrize("answer", ["50", "45 = 50", "45 8 5 2 = 50 :", "45 8 5 2 50", "45 8 x 2 = 50"])
def test_an_answer_that_is_no_problem_is_an_error_not_a_zero(answer):
    with pytest.raises(ValueError, match="is no problem"):
        verify("+ - +", answer)


@pytest.mark.parametrize(
    ("response", "start"),
    [("+ - +", 0), ("  + - +", 2), ("+ 1 wait  - 2 ", 10), ("+ 1 wait", -1), ("", -1), ("7 +", -1), ("+ + x", -1)],
)
def test_where_the_answer_stands(response, start):
    assert answer_start(response) == start


def test_the_name_finds_it_and_its_known_answers_hold():
    assert make_verifier("signs") is verify
