"""Words counted in responses: in any case, whole words alone. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def finder(words: Iterable[str]) -> Callable[[str], list[str]]:
    """What finds the words of a text: each occurrence, in lower case, in order. Where several words begin at a place
    it is the longest; an apostrophe is the same as a typographic one.

    Args:
        words: at least one; none is empty.
    """
    found_in = places(words)
    return lambda text: [word for _, _, word in found_in(text)]


def places(words: Iterable[str]) -> Callable[[str], list[tuple[int, int, str]]]:
    """As `finder`, with where each begins and ends, in characters from the start of the text."""
    longest_first = sorted((re.escape(_plain(word)) for word in words), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
    return lambda text: [(*each.span(), each[0].lower()) for each in pattern.finditer(_plain(text))]


def _plain(text: str) -> str:
    return text.replace("\u2019", "'")
