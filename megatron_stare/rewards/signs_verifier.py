"""Verifies answers to the problems of `data/signs.py`. Runs in reward workers and imports only the
standard library."""

from __future__ import annotations

import re

_PROBLEM = re.compile(r"([0-9]+)((?: [0-9]+)+) = (-?[0-9]+)")
_STEP = re.compile(r"([+-][0-9]+)(?:\s+[0-9]+)?(?:\s+|$)")

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    ("+8 -5 +2", "33 8 5 2 = 38", 1.0),
    ("+8 41 -5 36 +2 38", "33 8 5 2 = 38", 1.0),
    ("+8 41 +5 46 -2 44 wait +8 41 -5 36 +2 38", "33 8 5 2 = 38", 1.0),
    ("+8 41 -5 36 +2 38 wait +8 41 +5 46 -2 44", "33 8 5 2 = 38", 0.0),
    ("+8 41 -5 36 +2 38 wait", "33 8 5 2 = 38", 0.0),
    ("+8 +5 +2", "33 8 5 2 = 38", 0.0),
    ("+5 36", "33 8 5 2 = 38", 0.0),
    ("-5 +8 +2", "33 8 5 2 = 38", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the last attempt of the response solves the problem, else 0.0.

    The last attempt is the text after the last 'wait', or the whole response if the response
    contains no 'wait'. The problem '33 8 5 2 = 38' has the first number 33, the operands 8, 5 and
    2, and the total 38. A step is a signed operand, optionally followed by a running total. An
    attempt solves the problem if the first number plus all signed operands equals the total. The
    steps must use every operand of the problem once, in the problem's order. The attempt must
    contain nothing but steps. Running totals are not checked, because a policy that computes wrong
    running totals reaches the problem's total only by luck.

    Args:
        answer: the problem, such as '33 8 5 2 = 38'.

    Raises:
        ValueError: `answer` does not have the form of a problem.
    """
    problem = _PROBLEM.fullmatch(answer)
    if not problem:
        raise ValueError(f"{answer[:80]!r} is no problem of the form '33 8 5 2 = 38'")
    operands = problem[2].split()
    steps = _last_attempt(response)[1]
    # compared as text: a policy can write more digits than int() accepts
    if [step[1:] for step in steps] != operands:
        return 0.0
    return float(int(problem[1]) + sum(map(int, steps)) == int(problem[3]))


def answer_start(response: str) -> int:
    """Returns the character index of the first step after the last 'wait'. Returns -1 if the text
    after the last 'wait' contains no steps, or contains anything besides steps. A step is a signed
    operand, optionally followed by a running total."""
    start, steps = _last_attempt(response)
    return start if steps else -1


def _last_attempt(response: str) -> tuple[int, list[str]]:
    """Returns the character index at which the last attempt starts, and the list of the last
    attempt's steps. The last attempt is the text after the last 'wait'. If the response contains no
    'wait', the last attempt is the whole response. Leading whitespace does not belong to the last
    attempt. The list of steps is empty if the last attempt contains anything besides steps."""
    start = response.rfind("wait") + len("wait") if "wait" in response else 0
    start += len(response[start:]) - len(response[start:].lstrip())
    at, steps = start, []
    while match := _STEP.match(response, at):
        steps.append(match[1])
        at = match.end()
    return start, steps if at == len(response) else []
