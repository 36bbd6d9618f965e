r"""Verifies multiple-choice answers by comparing the letters of the final answer. Runs in reward
workers and does not import torch."""

from __future__ import annotations

import re

from megatron_stare.rewards.answer_text import plain, without_fonts
from megatron_stare.rewards.final_answer import final_answer, final_answer_start

_LETTER = re.compile(r"\(?([A-Za-z])(?:[).:].*)?")
_SEPARATOR = re.compile(r"\s*(?:,|;|\band\b)\s*")

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"\boxed{B}", "B", 1.0),
    (r"\boxed{\text{(B)}}", "B", 1.0),
    (r"\boxed{\textbf{(B) }12}", "(B)", 1.0),
    ("<answer>b. the second</answer>", "B", 1.0),
    (r"\boxed{C, A}", "A,C", 1.0),
    (r"\boxed{A, B}", "B", 0.0),
    (r"\boxed{12}", "B", 0.0),
    (r"\boxed{Bad}", "B", 0.0),
    ("B", "B", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the final answer names exactly the choices that `answer` names, in any order,
    else 0.0.

    Raises:
        ValueError: `answer` names no choice.
    """
    wanted, given = _letters(answer), final_answer(response)
    if wanted is None:
        raise ValueError(f"the reference {answer[:80]!r} names no choice")
    return float(given is not None and _letters(given) == wanted)


answer_start = final_answer_start


def normal_answer(response: str) -> str:
    """Returns the letters of the final answer in alphabetical order, or "" if the final answer
    names no choice."""
    return ",".join(sorted(_letters(final_answer(response) or "") or ()))


def _letters(text: str) -> frozenset[str] | None:
    """Returns the letters, such as B, of all answer options that a text names. The text is split at
    commas, semicolons and the word 'and'. Returns None if a piece of the split text is not the
    letter of an option."""
    text = without_fonts(text).replace("$", "").strip()
    parts = [_LETTER.fullmatch(plain(part)) for part in _SEPARATOR.split(text)]
    return frozenset(part[1].upper() for part in parts if part) if all(parts) else None
