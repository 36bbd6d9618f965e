r"""STARE's three-way scorer: which part of a response is read, and that each of the three ways can
say right alone."""

from __future__ import annotations

import pytest

from megatron_stare.rewards import stare_verifier
from megatron_stare.rewards.stare_verifier import answer_region, normal_answer, verify


@pytest.mark.parametrize(
    ("response", "region"),
    [
        ("<answer>1</answer> <answer>2</answer> 3", "2"),
        ("<answer>2, cut off", "2, cut off"),
        ("a</think>b</thinking>c", "c"),
        ("a</thinking>b</think>c", "b</think>c"),
        ("a</think>b</think> c ", "c"),
        ("Final Answer: 5", "5"),
        ("Final Answer: 4\nFinal Answer: **5**", "5"),
        ("Conclusion: 4. Answer: 5", "5"),  # the marks have an order, which is not that of the text
        ("Answer: 5. Conclusion: 4", "5. Conclusion 4"),
        ("**Answer**: 5", "5"),
        ("所以 **答案**：5", "5"),
        ("答案：5", "5"),
        ("最终答案：5", "5"),
        ("总结：5", "5"),
        ("<answer>Answer: 7</answer>", "7"),
        ("</think>Answer: 7", "7"),
        ("Answer: 7 </think> 8", "8"),
        ("x" * 400, "x" * 300),
        ("9\n\n" + "\n\n".join("abcdefghij"), "\n\n".join("abcdefghij")),
    ],
)
def test_the_region_of_the_answer(response: str, region: str) -> None:
    assert answer_region(response) == region


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("The answer is 42.", "42", True),  # by the region alone: no box
        (r"It is \boxed{42}.", "42", True),
        (r"\boxed{42} and then " + "words " * 60, "42", False),  # before the last 300 characters
        (r"Of 7 people \boxed{\text{Paris}}", "Paris", True),  # by our comparison of the box
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", True),
        (r"\boxed{41}", "42", False),
        ("42 </think> 41", "42", False),
        ("", "42", False),
    ],
)
def test_right_by_any_of_the_three_ways(response: str, answer: str, right: bool) -> None:
    assert verify(response, answer) == float(right)


@pytest.mark.parametrize("way", ["region", "box", "comparison"])
def test_each_way_is_enough(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the other two refusing all."""
    response = r"Answer: so \boxed{5}"
    boxed = {"region": r"so \boxed{5}", "box": "5"}.get(way)
    monkeypatch.setattr(stare_verifier, "_read", lambda text, answer: text == boxed)
    monkeypatch.setattr(
        stare_verifier.math_verifier, "equal", lambda wanted, given: way == "comparison"
    )
    assert verify(response, "5") == 1.0
    monkeypatch.setattr(stare_verifier, "_read", lambda text, answer: False)
    assert verify(response, "5") == float(way == "comparison")


def test_what_is_compared_is_the_answers_own_box() -> None:
    assert normal_answer(r"\boxed{3} </think> \boxed{4}") == "4"
    assert normal_answer(r"\boxed{3} </think> 4") == ""
