r"""Verifies answers that consist of one number. The number may differ slightly from the reference.
The module runs in reward workers and does not import torch."""

from __future__ import annotations

import math

from megatron_stare.rewards.answer_text import bare, number, quotient
from megatron_stare.rewards.final_answer import final_answer, final_answer_start

RELATIVE = 1e-6
"""Largest relative difference between answer and reference at which the answer counts as right."""

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"\boxed{0.5}", "1/2", 1.0),
    (r"\boxed{-\frac{1}{2}}", "-0.5", 1.0),
    (r"\boxed{\frac12}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\frac{-1}{2}}", r"-\dfrac12", 1.0),
    (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
    (r"\boxed{-0.5}", r"\frac{-1}{2}", 1.0),
    (r"\boxed{3\times 10^{8}\text{ m/s}}", "300,000,000", 1.0),
    ("<answer>6.02e23</answer>", "602000000000000000000000", 1.0),
    (r"\boxed{0.333}", "1/3", 0.0),
    (r"\boxed{1/0}", "0", 0.0),
    (r"\boxed{five}", "5", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the final answer is a number and its relative difference from `answer` is at
    most `RELATIVE`, else 0.0.

    Raises:
        ValueError: `answer` is not a number.
    """
    wanted, given = _value(answer), final_answer(response)
    if wanted is None:
        raise ValueError(f"the reference {answer[:80]!r} is not a number")
    value = None if given is None else _value(given)
    return float(value is not None and math.isclose(value, wanted, rel_tol=RELATIVE))


answer_start = final_answer_start


def normal_answer(response: str) -> str:
    """Returns the final answer as a number in Python's notation, or "" if the final answer is not a
    number."""
    value = _value(final_answer(response) or "")
    return "" if value is None else repr(value + 0.0).removesuffix(".0")  # + 0.0 turns -0 into 0


def _value(text: str) -> float | None:
    text = bare(text)
    if (found := number(text)) is not None:
        return float(found)
    value = quotient(text)
    return None if value is None else float(value)
