"""Implements the verifier `math_verify`, which passes responses to math-verify unchanged. The
verifier `math` first rewrites notations that math-verify misreads. `math_verify` exists so that
users can compare `math` with plain math-verify. math-verify also finds answers outside a LaTeX box,
and can therefore take any number in the response for the answer."""

from __future__ import annotations

import logging

from math_verify import parse
from math_verify import verify as equal

logging.getLogger("math_verify").setLevel(logging.ERROR)  # as in rewards/math_verifier.py

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"So the total is \boxed{42}.", "42", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{41}", "42", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if math-verify finds the response equal to the answer, else 0.0. math-verify runs
    with its default settings, but without time limits."""
    wanted = parse(f"\\boxed{{{answer.removeprefix('$').removesuffix('$')}}}", parsing_timeout=None)
    return float(equal(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))
