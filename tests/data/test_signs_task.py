"""The task of signs: pure functions of (seed, split, index), disjoint splits, and demonstrations
that reckon right."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations, permutations

import pytest

from megatron_stare.data.signs import (
    PROBLEMS,
    REFLECTION,
    SIGNS,
    VOCABULARY,
    Problem,
    SignsPrompts,
    demonstration,
    draw_problem,
    split_of,
)
from megatron_stare.rewards.signs_verifier import verify

EXAMPLE = Problem(33, (8, 5, 2), 38)


def attempts_of(text: str) -> list[list[str]]:
    return [attempt.split() for attempt in text.split(f" {REFLECTION} ")]


def test_problems_are_fixed_for_all_time():
    # Written down, so that a change of the stream is noticed: it would change what every saved
    # cursor means.
    assert [draw_problem(1, "train", i).text for i in range(2)] == [
        "39 8 3 6 = 34 :",
        "27 3 7 4 = 27 :",
    ]
    assert [draw_problem(1, "eval", i).answer for i in range(2)] == [
        "43 6 3 5 = 39",
        "32 4 7 8 = 27",
    ]


def test_text_answer_and_name():
    assert EXAMPLE.text == "33 8 5 2 = 38 :"
    assert EXAMPLE.answer == "33 8 5 2 = 38"
    assert {Problem(33, order, 38).name for order in permutations((8, 5, 2))} == {"33 2 5 8 = 38"}
    assert EXAMPLE.totals((1, -1, 1)) == [41, 36, 38]
    assert EXAMPLE.totals((-1, -1, -1)) == [25, 20, 18]


def test_problems_have_a_solution_and_words_for_all_that_is_met_on_the_way():
    problems = [draw_problem(7, "train", i) for i in range(2000)]
    met = {total for p in problems for signs in SIGNS for total in p.totals(signs)}
    assert min(met) >= 1 and max(met) <= 68
    assert all(any(p.totals(signs)[-1] == p.total for signs in SIGNS) for p in problems)
    assert all(len(set(p.operands)) == 3 for p in problems)
    assert {p.start for p in problems} == set(range(25, 45))
    assert {word for p in problems for word in p.text.split()} <= set(VOCABULARY)


def test_splits_are_disjoint_whatever_the_seed_and_the_order():
    train = {draw_problem(seed, "train", i).name for seed in (1, 2) for i in range(1500)}
    held_out = {draw_problem(seed, "eval", i).name for seed in (1, 3) for i in range(1500)}
    assert not train & held_out
    assert len(train) > 2500 and len(held_out) > 1000
    for name in list(held_out)[:50]:
        start, a, b, c, _, total = name.split()
        orders = permutations((int(a), int(b), int(c)))
        assert {split_of(Problem(int(start), order, int(total))) for order in orders} == {"eval"}


def test_how_many_problems_there_are():
    every = {
        Problem(start, operands, Problem(start, operands, 0).totals(signs)[-1])
        for start in range(25, 45)
        for operands in combinations(range(1, 10), 3)
        for signs in SIGNS
    }
    assert Counter(map(split_of, every)) == PROBLEMS
    assert SignsPrompts.counts == PROBLEMS


def test_a_guess_has_all_signs_alike():
    assert demonstration(EXAMPLE, 1, 1.0, 0.5) == "+8 +5 +2"
    assert demonstration(Problem(33, (8, 5, 2), 28), 1, 1.0, 0.5) == "-8 -5 -2"
    # of a total that is the start itself
    assert demonstration(Problem(33, (7, 5, 2), 33), 1, 1.0, 0.5) == "-7 -5 -2"


def test_a_search_reckons_right_and_ends_at_the_first_attempt_that_hits():
    first = Counter()
    for i in range(800):
        problem = draw_problem(3, "train", i)
        text = demonstration(problem, i, 0.0, 0.0)
        attempts = attempts_of(text)
        assert verify(text, problem.answer) == 1
        assert [attempt[-1] == str(problem.total) for attempt in attempts].index(True) == len(
            attempts
        ) - 1
        tried = []
        for attempt in attempts:
            signs = tuple(1 if step[0] == "+" else -1 for step in attempt[::2])
            tried.append(SIGNS.index(signs))
            assert [int(step) for step in attempt[::2]] == [
                s * x for s, x in zip(signs, problem.operands, strict=True)
            ]
            assert attempt[1::2] == [str(total) for total in problem.totals(signs)]
        # so never one twice
        assert tried == [(tried[0] + k) % len(SIGNS) for k in range(len(tried))]
        first[tried[0]] += 1
        assert set(text.split()) <= set(VOCABULARY)
    assert len(first) == len(SIGNS) and min(first.values()) > 60  # it begins anywhere


def test_rates_are_rates_and_demonstrations_repeat():
    problems = [draw_problem(1, "train", i) for i in range(3000)]
    texts = [demonstration(p, 5, 0.4, 0.25) for p in problems]
    assert texts == [demonstration(p, 5, 0.4, 0.25) for p in problems]
    searches = [
        (p, text)
        for p, text in zip(problems, texts, strict=True)
        if any(word[0].isdigit() for word in text.split())
    ]
    assert 1 - len(searches) / 3000 == pytest.approx(0.4, abs=0.03)
    misses = sum(len(attempts_of(text)) - int(verify(text, p.answer)) for p, text in searches)
    given_up = sum(verify(text, p.answer) == 0 for p, text in searches)
    assert given_up / misses == pytest.approx(0.25, abs=0.03)
    for rates in ((1.5, 0.0), (0.0, -0.1)):
        with pytest.raises(ValueError, match="probability"):
            demonstration(EXAMPLE, 5, *rates)


def test_after_eight_misses_there_is_nothing_left_to_try():
    impossible = Problem(33, (8, 5, 2), 99)
    assert len(attempts_of(demonstration(impossible, 1, 0.0, 0.0))) == 8


def test_the_task_needs_no_torch():
    script = "import sys, megatron_stare.data.signs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
