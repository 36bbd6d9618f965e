"""Finds and counts whole words in responses, without regard to case. Pure.

`finder` makes a function that finds given words in a text. The configuration can list these words.
For an evaluation, `reflection_counts` counts the words of each category in a text. For each
category, `tokens_by_category` finds the tokens that belong to a word of the category.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

# STARE (arXiv 2606.19236), appendix B.6, names these categories and finds them by words, but does
# not publish its lists. These lists are ours. They include the paper's examples: "should be",
# "but", "instead", "verification".
CATEGORIES: dict[str, tuple[str, ...]] = {
    "self_correction": (
        *(
            "should be",
            "actually",
            "mistake",
            "mistaken",
            "correction",
            "correct that",
            "wrong",
            "error",
            "oops",
        ),
        *("incorrect", "no,", "sorry"),
    ),
    "self_questioning": (
        *(
            "wait",
            "hmm",
            "is that right",
            "is this right",
            "why",
            "how come",
            "what if",
            "but why",
            "does that",
        ),
        *("does this", "can we", "could it be"),
    ),
    "verification": (
        *(
            "verification",
            "verify",
            "verifying",
            "verified",
            "check",
            "checks",
            "checking",
            "double-check",
            "confirm",
        ),
        *("double check", "confirms", "make sure", "sanity check", "plug in", "substituting back"),
    ),
    "alternative": (
        *(
            "instead",
            "alternatively",
            "alternative",
            "another way",
            "another approach",
            "another method",
            "or else",
        ),
        *("a different approach", "a different way", "on the other hand", "otherwise"),
    ),
    "re_evaluation": (
        *(
            "but",
            "however",
            "reconsider",
            "re-evaluate",
            "reevaluate",
            "re-examine",
            "rethink",
            "revisit",
            "again",
        ),
        *("let me see", "go back", "start over", "look again"),
    ),
    "uncertainty": (
        *(
            "maybe",
            "perhaps",
            "probably",
            "possibly",
            "might",
            "could be",
            "not sure",
            "seems",
            "unclear",
            "i think",
        ),
        *("i guess", "likely"),
    ),
}

# Words by which a chain of thought reflects on itself (docs/evaluation.md). The categories are
# three of the four behaviours of Gandhi et al. (arXiv 2503.01307), as far as single words show
# them; the words are ours. "double-check" counts once, under verification.
BEHAVIOURS: dict[str, tuple[str, ...]] = {
    "verification": (
        *(
            "check",
            "checks",
            "checking",
            "double-check",
            "double check",
            "verify",
            "verifies",
            "verifying",
        ),
        *("verification", "confirm", "confirms", "confirming", "make sure", "sanity check"),
    ),
    "backtracking": (
        *(
            "wait",
            "hmm",
            "hold on",
            "actually",
            "oops",
            "mistake",
            "mistaken",
            "incorrect",
            "wrong",
            "error",
        ),
        *("go back", "reconsider", "rethink", "re-examine", "start over"),
    ),
    "alternatives": (
        *(
            "alternatively",
            "alternative",
            "another way",
            "another approach",
            "another method",
            "a different way",
        ),
        *(
            "a different approach",
            "instead",
            "on the other hand",
            "what if",
            "let me try",
            "let's try",
        ),
    ),
}


def finder(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Makes a function that searches a text for every occurrence of the given words. The new
    function returns the words that it finds, in lower case and in the order of the text.

    If several words begin at the same character, only the longest word counts. A typographic
    apostrophe matches a plain apostrophe.

    Args:
        words: at least one word; no word may be empty.
    """
    found_in = places(words)
    return lambda text: [word for _, _, word in found_in(text)]


def places(words: Iterable[str]) -> Callable[[str], list[tuple[int, int, str]]]:
    """Makes a function that searches a text for every occurrence of the given words, by the rules
    of `finder`. The new function returns (begin, end, word) for each occurrence. `begin` and `end`
    are character positions in the text."""
    longest_first = sorted((re.escape(_plain(word)) for word in words), key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
    return lambda text: [(*each.span(), each[0].lower()) for each in pattern.finditer(_plain(text))]


def reflection_counts(text: str) -> dict[str, int]:
    """Counts how many words of a text belong to each category of BEHAVIOURS. Returns the counts by
    category, including counts of 0."""
    found = Counter(_BEHAVIOUR[word] for word in _behaviours_in(text))
    return {category: found[category] for category in BEHAVIOURS}


def tokens_by_category(pieces: Sequence[str]) -> dict[str, set[int]]:
    """Returns the indices of the tokens that belong to each category of CATEGORIES. A token belongs
    to a category if at least one of its characters is part of a word from the category.

    Args:
        pieces: the text of each token of a response.
    """
    ends = list(accumulate(len(piece) for piece in pieces))
    found: dict[str, set[int]] = {category: set() for category in CATEGORIES}
    token = 0
    for begin, end, word in _placed("".join(pieces)):
        while ends[token] <= begin:  # words come in order of their place
            token += 1
        last = token
        while ends[last] < end:
            last += 1
        found[_CATEGORY[word]] |= {i for i in range(token, last + 1) if pieces[i]}
    return found


def _plain(text: str) -> str:
    return text.replace("\u2019", "'")


_CATEGORY = {word: category for category, words in CATEGORIES.items() for word in words}
_BEHAVIOUR = {word: category for category, words in BEHAVIOURS.items() for word in words}
_placed = places(_CATEGORY)
_behaviours_in = finder(_BEHAVIOUR)
