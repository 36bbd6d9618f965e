"""The arithmetic task: pure functions of (seed, split, index), disjoint splits, and demonstrations
that add up."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations_with_replacement, permutations

import pytest
from support.char_tokenizer import CHAT_TEMPLATE, char_tokenizer, ids

from megatron_stare.config.load import validate
from megatron_stare.data.arithmetic import (
    ALPHABET,
    PROBLEMS,
    ArithmeticPrompts,
    Problem,
    demonstration,
    draw_problem,
    split_of,
)
from megatron_stare.data.prompt_source import make_source
from megatron_stare.data.streams import counter_hash
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.rewards.arithmetic_verifier import verify


def config(**sections):
    return validate({"model": {"path": "."}, "data": {"source": "arithmetic"}} | sections, "test")


def test_counter_hash_is_splitmix64():
    assert counter_hash(0) == 0xE220A8397B1DCDAF  # the published first output of seed 0
    assert len({counter_hash(a, b) for a in range(50) for b in range(50)}) == 2500
    assert counter_hash(1, 2) != counter_hash(2, 1)


def test_problems_are_fixed_for_all_time():
    # Written down, so that a change of the stream is noticed: it would change what every saved
    # cursor means.
    assert [draw_problem(1, "train", i).text for i in range(3)] == [
        "85+75+74=",
        "81+46+91=",
        "77+21+54=",
    ]
    assert [draw_problem(1, "eval", i).text for i in range(3)] == [
        "41+37+94=",
        "58+18+62=",
        "22+52+77=",
    ]


def test_splits_are_disjoint_whatever_the_seed_and_the_order():
    train = {
        tuple(sorted(draw_problem(seed, "train", i).operands))
        for seed in (1, 2)
        for i in range(3000)
    }
    held_out = {
        tuple(sorted(draw_problem(seed, "eval", i).operands))
        for seed in (1, 3)
        for i in range(3000)
    }
    assert not train & held_out
    assert len(train) > 5000
    assert len(held_out) > 3000
    for operands in list(held_out)[:50]:
        assert {split_of(Problem(order)) for order in permutations(operands)} == {"eval"}


def test_a_tenth_is_held_out_and_operands_are_uniform():
    every = [
        (a, b, c) for a in range(10, 100, 3) for b in range(10, 100, 3) for c in range(10, 100, 3)
    ]
    share = sum(split_of(Problem(operands)) == "eval" for operands in every) / len(every)
    assert share == pytest.approx(0.1, abs=0.01)
    drawn = Counter(x for i in range(3000) for x in draw_problem(7, "train", i).operands)
    assert set(drawn) == set(range(10, 100))
    assert max(drawn.values()) < 2 * min(drawn.values())


def test_text_and_answer():
    problem = Problem((27, 58, 14))
    assert (problem.text, problem.answer) == ("27+58+14=", "99")


def check_lines(problem: Problem, text: str) -> int:
    """How many lines are off by something small; everything else about the derivation must be
    right."""
    first, second = text.split(";")
    terms, partial = first.split("=")
    pair = [int(x) for x in terms.split("+")]
    rest = list(problem.operands)
    for x in pair:
        rest.remove(x)
    terms, total = second.split("=")
    assert sorted(int(x) for x in terms.split("+")) == sorted([int(partial), *rest])
    slips = [int(partial) - sum(pair), int(total) - int(partial) - rest[0]]
    assert all(abs(slip) <= 10 for slip in slips)
    return sum(slip != 0 for slip in slips)


def test_right_demonstrations_use_all_twelve_derivations_alike():
    problem = Problem((27, 58, 14))
    seen = Counter(demonstration(problem, seed, 0.0) for seed in range(1200))
    assert len(seen) == 12
    assert {"14+27=41;41+58=99", "14+27=41;58+41=99"} <= set(seen)
    assert min(seen.values()) > 60
    assert all(
        check_lines(problem, text) == 0 and verify(text, problem.answer) == 1 for text in seen
    )
    assert set("".join(seen) + problem.text) <= set(ALPHABET)


def test_wrong_demonstrations_have_one_slip_and_a_wrong_answer():
    problems = [draw_problem(1, "train", i) for i in range(1000)]
    texts = [demonstration(problem, 5, 1.0) for problem in problems]
    assert all(
        check_lines(p, text) == 1 and verify(text, p.answer) == 0
        for p, text in zip(problems, texts, strict=True)
    )
    slips_first = sum(
        sum(map(int, t.split("=")[0].split("+"))) != int(t.split("=")[1].split(";")[0])
        for t in texts
    )
    assert 400 < slips_first < 600


def test_wrong_rate_is_a_rate_and_demonstrations_repeat():
    problems = [draw_problem(1, "train", i) for i in range(2000)]
    texts = [demonstration(problem, 5, 0.3) for problem in problems]
    assert texts == [demonstration(problem, 5, 0.3) for problem in problems]
    wrong = sum(verify(text, p.answer) == 0 for p, text in zip(problems, texts, strict=True))
    assert wrong / 2000 == pytest.approx(0.3, abs=0.04)
    with pytest.raises(ValueError, match="probability"):
        demonstration(problems[0], 5, 1.5)


def test_source_counts_on_and_resumes_exactly():
    source = make_source(config(), char_tokenizer(), "train")
    prompts = source.take(3) + source.take(2)
    assert [p.cursor for p in prompts] == [0, 1, 2, 3, 4]
    assert all(p.token_ids == ids(p.text) for p in prompts)  # no BOS slipped in
    state = source.state()
    later = source.take(4)
    resumed = make_source(config(), char_tokenizer(), "train")
    resumed.restore(state)
    assert resumed.take(4) == later


def test_seed_orders_training_and_leaves_evaluation_alone():
    def texts(seed, split):
        return [
            p.text
            for p in ArithmeticPrompts(config(run={"seed": seed}), char_tokenizer(), split).take(8)
        ]

    assert texts(1, "train") != texts(2, "train")
    assert texts(1, "eval") == texts(2, "eval")


def test_chat_template_wraps_the_prompt():
    chat = config(data={"source": "arithmetic", "chat_template": True})
    (prompt,) = make_source(chat, char_tokenizer(CHAT_TEMPLATE), "train").take(1)
    assert prompt.token_ids == ids(f"u {prompt.text};a ")
    with pytest.raises(ConfigError, match="no chat template"):
        make_source(chat, char_tokenizer(), "train")


def test_a_limit_too_low_is_refused_before_the_run():
    with pytest.raises(DataError, match="has 9 tokens"):
        make_source(config(rollout={"max_prompt_tokens": 8}), char_tokenizer(), "train")


def test_the_first_prompt_is_the_one_that_a_limit_is_tried_on():
    """The signs' prompts differ in length, and of this seed's first two the first is the longer."""
    signs = {"data": {"source": "signs"}, "run": {"seed": 337}}
    first, second = make_source(config(**signs), char_tokenizer(), "train").take(2)
    assert (first.text, second.text) == ("30 2 5 8 = 25 :", "25 8 1 7 = 9 :")
    with pytest.raises(DataError, match="has 15 tokens"):
        make_source(config(**signs, rollout={"max_prompt_tokens": 14}), char_tokenizer(), "train")


def test_unknown_source_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        make_source(config(data={"source": "arithmetics"}), char_tokenizer(), "train")


def test_the_task_needs_no_torch():
    script = "import sys, megatron_stare.data.arithmetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_how_many_problems_there_are():
    splits = Counter(
        split_of(Problem(sums)) for sums in combinations_with_replacement(range(10, 100), 3)
    )
    assert splits == PROBLEMS
    for split in ("train", "eval"):
        assert ArithmeticPrompts(config(), char_tokenizer(), split).problems == PROBLEMS[split]


def test_reorderings_are_one_problem():
    """964 of the 1,000 problems of the quickstart's evaluation are distinct: 4 come twice, 32 in
    another order."""
    prompts = make_source(config(), char_tokenizer(), "eval").take(1000)
    assert len({p.text for p in prompts}) == 996
    assert len({p.problem for p in prompts}) == 964
    assert Problem((27, 58, 14)).name == Problem((58, 14, 27)).name == "14+27+58"
    for prompt in prompts:
        operands = prompt.text.removesuffix("=").split("+")
        assert prompt.problem == "+".join(sorted(operands))
