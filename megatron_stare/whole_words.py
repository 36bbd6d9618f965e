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
    longest_first = sorted((re.escape(_plain(word)) for word in words), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
    return lambda text: [found.lower() for found in pattern.findall(_plain(text))]


def _plain(text: str) -> str:
    return text.replace("\u2019", "'")
