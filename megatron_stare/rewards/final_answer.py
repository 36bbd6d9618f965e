"""Finds where a response says its answer: in a box, or in <answer>...</answer>. Imports the
standard library only."""

from __future__ import annotations

import re
from typing import NamedTuple

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BARE = re.compile(r"[^\s{}$\\,;]+")  # what a box without braces holds: a number or a name
_OPEN, _CLOSE = "<answer>", "</answer>"


class Box(NamedTuple):
    """A box of a response.

    start: characters from the start of the response.
    content: what stands in it; None where its braces do not close, as in an answer that was cut
    off.
    """

    start: int
    content: str | None


def last_box(text: str) -> Box | None:
    """The last box of a text, of boxes in boxes the innermost; None: there is none.

    Time is linear in the length of the text: braces are counted behind the last box alone.
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
    """The content of the last box; None if there is none, or if its braces do not close."""
    box = last_box(text)
    return box.content if box else None


def _braced(text: str, start: int) -> str | None:
    r"""Text from `start` to the brace that closes the one before it; None: it does not close.

    \{ and \} are printed, and need no partner.
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
    """The text of the answer; None if there is none, or if the last one is not closed."""
    found = _found(response)
    return found[1] if found else None


def final_answer_start(response: str) -> int:
    """Finds where the answer begins, characters from the start; -1 if none is closed with something
    in it."""
    found = _found(response)
    return found[0] if found and found[1] and found[1].strip() else -1


def _found(response: str) -> tuple[int, str | None] | None:
    box, tag = last_box(response), response.rfind(_OPEN)
    if tag > (box.start if box else -1):
        start = tag + len(_OPEN)
        end = response.find(_CLOSE, start)
        return tag, response[start:end] if end >= 0 else None
    return (box.start, box.content) if box else None
