"""Finds the final answer of a response. The final answer is in a box or between <answer> and
</answer>. Imports the standard library only."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s{}$\\,;]+")  # content of a box without braces: a number or a name
_OPEN, _CLOSE = "<answer>", "</answer>"


class Box(NamedTuple):
    """A box of a response.

    `start`: position of the box, as a character index in the response.
    `content`: text in the box; None if the closing brace is missing, as in a truncated answer.
    """

    start: int
    content: str | None


def last_box(text: str) -> Box | None:
    """Returns the box that starts last in a text, or None if the text has no box. If the last box
    is inside another box, the inner box is returned.

    The run time is proportional to the length of the text, even for a text with many boxes. The
    function first searches the text for the last box, and then counts the braces of this box only.
    """
    found = None
    for found in _BOX.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if found is None:
        return None
    at = found.end()
    if at < len(text) and text[at] == "{":
        return Box(found.start(), _braced(text, at + 1))
    bare = _BARE.match(text, at)
    return Box(found.start(), bare[0].rstrip(".") if bare else None)


def last_boxed(text: str) -> str | None:
    """Returns the content of the last box. Returns None if the text has no box, or if the last box
    has no closing brace."""
    box = last_box(text)
    return box.content if box else None


def _braced(text: str, start: int) -> str | None:
    r"""Returns the text from `start` to the closing brace that matches the opening brace just
    before `start`. Returns None if the closing brace is missing.

    The escapes \{ and \} are ordinary characters, not braces.
    """
    at, depth = start, 1
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at]
        at += 1
    return None


def final_answer(response: str) -> str | None:
    """Returns the text of the final answer. Returns None if the response has no final answer, or if
    the closing brace or tag of the final answer is missing."""
    found = _found(response)
    return found[1] if found else None


def final_answer_start(response: str) -> int:
    """Returns the position of the final answer in the response, as a character index. Returns -1 if
    the final answer is missing, empty, or without a closing brace or tag."""
    found = _found(response)
    return found[0] if found and found[1] and found[1].strip() else -1


def _found(response: str) -> tuple[int, str | None] | None:
    box, tag = last_box(response), response.rfind(_OPEN)
    if tag > (box.start if box else -1):
        start = tag + len(_OPEN)
        end = response.find(_CLOSE, start)
        return tag, response[start:end] if end >= 0 else None
    return (box.start, box.content) if box else None
