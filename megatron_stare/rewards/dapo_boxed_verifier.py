r"""Compares the content of the last box with the reference by DAPO's rule
(rewards/dapo_verifier.py), as JustRL does (arXiv 2512.16649)."""

from __future__ import annotations

from megatron_stare.rewards.dapo_verifier import normalised
from megatron_stare.rewards.final_answer import last_box, last_boxed

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"So \boxed{34}.", "34", 1.0),
    (r"So \boxed{\frac12}.", r"\frac{1}{2}", 1.0),
    (r"\boxed{34} or \boxed{33}", "34", 0.0),
    (r"\boxed{34", "34", 0.0),
    ("Answer: 34", "34", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the normalised content of the last box equals the normalised answer, else
    0.0."""
    given = last_boxed(response)
    return float(given is not None and normalised(given) == normalised(answer))


def answer_start(response: str) -> int:
    """Returns the position of the response's last box, as a character index. Returns -1 if the
    response has no box, or if the last box has no closing brace."""
    box = last_box(response)
    return box.start if box and box.content is not None else -1


def normal_answer(response: str) -> str:
    """Returns the normalised content of the last box. Returns "" if the response has no box, or if
    the last box has no closing brace."""
    return normalised(last_boxed(response) or "")
