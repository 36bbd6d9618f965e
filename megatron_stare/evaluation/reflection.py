"""Words by which a chain of thought looks back at itself, counted by category. Pure; docs/evaluation.md has the lists.

The categories are three of the four behaviours of Gandhi et al. (arXiv 2503.01307), as far as single words show them;
the words are ours. They are counted as whole_words.py says: "double-check" counts once, under verification.
"""

from __future__ import annotations

from collections import Counter

from megatron_stare.records.whole_words import finder

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
_found = finder(_CATEGORY)


def reflection_counts(text: str) -> dict[str, int]:
    """How often words of each category stand in a text, every category included."""
    found = Counter(_CATEGORY[word] for word in _found(text))
    return {category: found[category] for category in CATEGORIES}
