r"""Verifies answers by exact comparison of characters. Runs in reward workers and does not import
torch."""

from __future__ import annotations

from megatron_stare.rewards.final_answer import final_answer, final_answer_start

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"So it is \boxed{Paris}.", "Paris", 1.0),
    ("<answer> Paris </answer>", "Paris", 1.0),
    (r"\boxed{paris}", "Paris", 0.0),
    (r"\boxed{Paris} or \boxed{Rome}", "Paris", 0.0),
    ("Paris", "Paris", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the final answer equals `answer`, else 0.0. Both are
    compared without white space at their start and end."""
    given = final_answer(response)
    return float(given is not None and given.strip() == answer.strip())


answer_start = final_answer_start


def normal_answer(response: str) -> str:
    """Returns the final answer without white space at its start and end, or "" if the response has
    no final answer."""
    return (final_answer(response) or "").strip()
