"""Verifies answers to the problems of `data/arithmetic.py`. Runs in reward workers and imports only
the standard library."""

from __future__ import annotations

import re

_LAST_INTEGER = re.compile(r"\s*(-?)0*([0-9]+)\s*")


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the response ends with '=' and then the integer `answer`, else 0.0. In the
    response, the integer may have leading zeros, and whitespace before and after it.

    Raises:
        ValueError: `answer` is not an integer.
    """
    match = _answer(response)
    if not match:
        return 0.0
    # Compared as text: a policy can write more digits than int() accepts.
    return float(match[1] + match[2] == str(int(answer)))


def answer_start(response: str) -> int:
    """Returns the position of the last '=' in the response, as a character index. Returns -1 if the
    text after the last '=' is not an integer."""
    return response.rfind("=") if _answer(response) else -1


def normal_answer(response: str) -> str:
    """Returns the integer after the last '=' of the response, without leading zeros. Returns "" if
    the text after the last '=' is not an integer."""
    match = _answer(response)
    return match[1] + match[2] if match else ""


def _answer(response: str) -> re.Match[str] | None:
    _, equals, tail = response.rpartition("=")
    return _LAST_INTEGER.fullmatch(tail) if equals else None
