"""Words by which a chain of thought looks back at itself, counted by category. Pure; docs/evaluation.md has the lists.

The categories are three of the four behaviours of Gandhi et al. (arXiv 2503.01307), as far as single words show them;
the words are ours. Counted are occurrences in any case, whole words alone, the longest phrase where several begin at a
place: "double-check" counts once, under verification.
"""

from __future__ import annotations

import re
from collections import Counter

CATEGORIES: dict[str, tuple[str, ...]] = {
    "verification": (
        *("check", "checks", "checking", "double-check", "double check", "verify", "verifies", "verifying"),
        *("verification", "confirm", "confirms", "confirming", "make sure", "sanity check"),
    ),
    "backtracking": (
        *("wait", "hmm", "hold on", "actually", "oops", "mistake", "mistaken", "incorrect", "wrong", "error"),
        *("go back", "reconsider", "rethink", "re-examine", "start over"),
    ),
    "alternatives": (
        *("alternatively", "alternative", "another way", "another approach", "another method", "a different way"),
        *("a different approach", "instead", "on the other hand", "what if", "let me try", "let's try"),
    ),
}

_CATEGORY = {word: category for category, words in CATEGORIES.items() for word in words}
_WORDS = re.compile(
    r"(?<![A-Za-z])(?:" + "|".join(map(re.escape, sorted(_CATEGORY, key=len, reverse=True))) + r")(?![A-Za-z])",
    re.IGNORECASE,
)


def reflection_counts(text: str) -> dict[str, int]:
    """How often words of each category stand in a text, every category included."""
    plain = text.replace("\u2019", "'")
    found = Counter(_CATEGORY[match.group().lower()] for match in _WORDS.finditer(plain))
    return {category: found[category] for category in CATEGORIES}
