"""The verifier of `data/signs.py`. Runs in reward workers; imports nothing heavy."""

from __future__ import annotations

import re

_PROBLEM = re.compile(r"([0-9]+)((?: [0-9]+)+) = (-?[0-9]+)")
_ATTEMPT = re.compile(r"(?:[+-]\s*(?:[0-9]+\s*)?)+")

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    ("+ - +", "45 8 5 2 = 50", 1.0),
    ("+ 53 - 48 + 50", "45 8 5 2 = 50", 1.0),
    ("- 37 + 42 + 44 wait + 53 - 48 + 50", "45 8 5 2 = 50", 1.0),
    ("+ 53 - 48 + 50 wait - 37 + 42 + 44", "45 8 5 2 = 50", 0.0),
    ("+ 53 - 48 + 50 wait", "45 8 5 2 = 50", 0.0),
    ("+ + +", "45 8 5 2 = 50", 0.0),
    ("+ -", "45 8 5 2 = 50", 0.0),
)


def verify(response: str, answer: str) -> float:
    """1.0 if the signs after the last 'wait' lead from the first number over the operands to the total, else 0.0.

    Nothing but the signs, as many as there are operands, and a number behind any of them may stand there. The numbers
    are not checked: whoever misreckons finds the signs by luck alone.

    Args:
        answer: the problem, such as '45 8 5 2 = 50'.

    Raises:
        ValueError: `answer` is no such problem.
    """
    problem = _PROBLEM.fullmatch(answer)
    if not problem:
        raise ValueError(f"{answer[:80]!r} is no problem of the form '45 8 5 2 = 50'")
    operands = [int(word) for word in problem[2].split()]
    start = answer_start(response)
    signs = re.findall("[+-]", response[start:]) if start >= 0 else []
    if len(signs) != len(operands):
        return 0.0
    total = int(problem[1]) + sum(x if sign == "+" else -x for sign, x in zip(signs, operands, strict=True))
    return float(total == int(problem[3]))


def answer_start(response: str) -> int:
    """Where the attempt after the last 'wait' begins, characters from the start; -1 if none stands there."""
    start = response.rfind("wait")
    start = 0 if start < 0 else start + len("wait")
    start += len(response[start:]) - len(response[start:].lstrip())
    return start if _ATTEMPT.fullmatch(response, start) else -1
