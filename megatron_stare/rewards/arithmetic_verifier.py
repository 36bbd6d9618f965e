"""The verifier of `data/arithmetic.py`. Runs in reward workers; imports nothing heavy."""

from __future__ import annotations

import re

_LAST_INTEGER = re.compile(r"\s*(-?)0*([0-9]+)\s*")


def verify(response: str, answer: str) -> float:
    """1.0 if the response ends in '=' and the integer `answer`, with nothing after it but
    whitespace; else 0.0.

    Raises:
        ValueError: `answer` is not an integer.
    """
    match = _answer(response)
    if not match:
        return 0.0
    # Compared as text: a policy can write more digits than int() accepts.
    return float(match[1] + match[2] == str(int(answer)))


def answer_start(response: str) -> int:
    """Position of the last '=', characters from the start; -1 if no integer ends the response after
    it."""
    return response.rfind("=") if _answer(response) else -1


def normal_answer(response: str) -> str:
    """The integer that ends the response, without zeros before it; "" if there is none."""
    match = _answer(response)
    return match[1] + match[2] if match else ""


def _answer(response: str) -> re.Match[str] | None:
    _, equals, tail = response.rpartition("=")
    return _LAST_INTEGER.fullmatch(tail) if equals else None
