"""The mathematics verifier: where the answer must stand, and what counts as equal."""

from __future__ import annotations

import threading

import pytest

from megatron_stare.errors import ConfigError
from megatron_stare.rewards import math_verifier
from megatron_stare.rewards.math_verifier import answer_start, verify
from megatron_stare.rewards.verifier import make_verifier


def test_a_parser_that_fails_is_found_before_anything_is_judged(monkeypatch):
    assert make_verifier("math") is verify
    monkeypatch.setattr(math_verifier, "parse_math", lambda *args, **options: [])
    with pytest.raises(ConfigError, match=r"'0.5' earns 0.0, expected 1.0"):
        make_verifier("math")


@pytest.mark.parametrize(
    ("given", "answer", "reward"),
    [
        ("$42$", "42", 1.0),
        ("42", "$42$", 1.0),
        ("42", r"\boxed{42}", 1.0),
        (r"\$42", "42", 1.0),
        ("x = 5", "5", 1.0),
        ("50\\%", "50", 1.0),
        (r"10\text{ cm}", "10", 1.0),
        ("Paris", "Paris", 1.0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
        (r"$41$ or $42$", "42", 0.0),
        ("0.33", "1/3", 0.0),
        (r"\frac{", "1/2", 0.0),
        ("anything", "", 0.0),
        ("2", "2t", 0.0),
        (r"3\text{ or 4}", "3", 0.0),
        (r"3\text{ or four}", "3", 0.0),
        ("3 or more", "3", 0.0),
        (r"3\text{, perhaps}", "3", 0.0),
        ("hgm", "mgh", 1.0),
        ("seat", r"\text{east}", 0.0),
        ("East", "east", 1.0),
        ("2t", "t + t", 1.0),
        # more digits than Decimal's own 28
        ("1,267,650,600,228,229,401,496,703,205,376", "1267650600228229401496703205376", 1.0),
        ("1,267,650,600,228,229,401,496,703,205,377", "1267650600228229401496703205376", 0.0),
        ("1000000000000000000000000000001", "10^{30}", 0.0),
        ("1000000000000000000000000000000", "10^{30}", 1.0),
        (r"100000000000000000000000000000100\text{ cm}", r"10^{30}\text{ m}", 0.0),
        (r"100000000000000000000000000000000\text{ cm}", r"10^{30}\text{ m}", 1.0),
        ("9" * 2_000, "9" * 2_000, 1.0),
        ("9" * 2_000, "8" * 2_000, 0.0),
    ],
)
def test_reward(given, answer, reward):
    assert verify(f"The answer is \\boxed{{{given}}}.", answer) == reward


def test_works_outside_the_main_thread():
    # Where math-verify's own time limit raises, and its callers used to grade everything as wrong.
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(verify(r"\boxed{\frac{1}{2}}", "0.5")))
    thread.start()
    thread.join()
    assert rewards == [1.0]


@pytest.mark.parametrize(
    ("response", "start"),
    [
        (r"So \boxed{42}.", 3),
        (r"\boxed {42}", 0),
        (r"\boxed{1} or \boxed{2}", 13),
        ("The answer is 42.", -1),
        (r"\boxed{}", -1),
        (r"\boxed{ $ }", -1),
        (r"\boxed{42", -1),
    ],
)
def test_where_the_answer_stands(response, start):
    assert answer_start(response) == start
