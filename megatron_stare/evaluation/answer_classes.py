"""Which responses of a problem give the same answer, as the verifier sees it.

Two answers are the same where their normal forms are the same characters, or where the verifier takes a response with
the one for right when the other is its reference. Classes are built in the order of the samples, each by its first
answer, so they do not depend on what finished first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from megatron_stare.evaluation.response import Response

# judges (response, reference) pairs: whether each is right
Judged = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
Classes = list[int | None]
"""The class of each response, numbered from 0 as they come; None: it gives no answer."""

_INTEGER = re.compile(r"-?\d+")


def answer_classes(problems: Sequence[Sequence[Response]], judged: Judged) -> list[Classes]:
    """The classes of every problem's responses.

    Args:
        judged: asked once, of all pairs of answers that only the verifier can tell apart. Two integers in normal form
            are different if they are written differently.
    """
    firsts = [_firsts(responses) for responses in problems]
    pairs = [
        (number, one, other)
        for number, answers in enumerate(firsts)
        for at, other in enumerate(answers)
        for one in list(answers)[:at]
        if not (_INTEGER.fullmatch(one) and _INTEGER.fullmatch(other))
    ]
    verdicts = judged([(firsts[number][other].text, one) for number, one, other in pairs]) if pairs else []
    same = {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict}
    return [_classes(number, responses, list(firsts[number]), same) for number, responses in enumerate(problems)]


def _firsts(responses: Sequence[Response]) -> dict[str, Response]:
    """The first response that gives each answer."""
    found: dict[str, Response] = {}
    for response in responses:
        if response.answer:
            found.setdefault(response.answer, response)
    return found


def _classes(
    number: int, responses: Sequence[Response], answers: Sequence[str], same: set[tuple[int, str, str]]
) -> Classes:
    heads: list[str] = []
    class_of: dict[str, int] = {}
    for answer in answers:
        known = next((at for at, head in enumerate(heads) if (number, head, answer) in same), None)
        if known is None:
            known = len(heads)
            heads.append(answer)
        class_of[answer] = known
    return [class_of[response.answer] if response.answer else None for response in responses]
