"""The verifier of mathematics on answers labelled by hand, in the formats of the six evaluation
sets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from megatron_stare.rewards import math_verifier, math_verify_verifier

PATH = Path(__file__).parents[2] / "assets" / "verification" / "labelled_answers.jsonl"
CASES = [json.loads(line) for line in PATH.read_text().splitlines()]
SETS = ("AIME24", "AIME25", "AMC23", "MATH-500", "Minerva", "OlympiadBench")


def test_the_set_is_what_it_is_said_to_be():
    assert len(CASES) >= 300
    assert len({(case["gold"], case["response"]) for case in CASES}) == len(CASES)
    sizes, wrong = (
        Counter(case["set"] for case in CASES),
        Counter(case["set"] for case in CASES if not case["label"]),
    )
    assert set(sizes) == set(SETS) and min(sizes.values()) >= 40
    assert all(wrong[name] >= 0.4 * sizes[name] for name in SETS), (wrong, sizes)


def test_every_label():
    got = [(case, math_verifier.verify(case["response"], case["gold"])) for case in CASES]
    assert [case for case, reward in got if reward != case["label"]] == []


def test_at_least_thirty_need_more_than_math_verify():
    # those without any box do not count: that they are wrong is our rule, not a fault of
    # math-verify
    hard = [
        c
        for c in CASES
        if c["bare_math_verify"] != c["label"] and not c["why"].startswith("no box")
    ]
    failed = [
        c for c in hard if math_verify_verifier.verify(c["response"], c["gold"]) != c["label"]
    ]
    assert len(failed) >= 30
