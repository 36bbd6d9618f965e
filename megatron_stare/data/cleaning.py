"""Finds problems that should be removed from training data. A problem is a prompt with its answer.
The module finds repeated problems, and problems that also occur in an evaluation set.

Two problems are compared by their words, numbers and operators, in lower case. The comparison
ignores spacing, punctuation and dollar signs, but distinguishes 3+4 from 3-4. This module imports
only the standard library.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NGRAM = 13
"""Number of consecutive words. Two problems that share so many words count as copies of each other
(Brown et al., arXiv 2005.14165, appendix C)."""

# LaTeX delimiters, sizes and spaces
_LAYOUT = re.compile(r"\\[()\[\]]|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\[,;:! ]|~")
_GROUP = re.compile(r"\{\s*(\\?\w*)\s*\}")  # braces around one word mean nothing: x^{2} is x^2
# the hyphen in two-digit and n-sided, not the minus in x-y
_HYPHEN = re.compile(r"(?<=[^\W\d_]{3})-(?=[^\W\d_])|(?<=[^\W\d_])-(?=[^\W\d_]{3})")
# the star of a product, not of a list or of bold words
_STAR = r"(?<=[\w)\]}])\*{1,2}(?=[\w(\[{\\])|(?<=[\w)\]}] )\*(?= [\w(\[{\\])"
_FACTORIAL = r"(?<=\d)!|!(?=\s*[-+*/^=<>)])"
_PIECE = re.compile(
    rf"(?P<word>\d*\.\d+|[^\W_]+)|{_STAR}|{_FACTORIAL}|(?<=\d):(?=\d)|[-/^%()\[\]{{}}]|(?P<other>[^\w\s*!:])"
)


def pieces(text: str) -> list[tuple[str, bool]]:
    """Returns a text's words, numbers and operators in lower case and in order. A piece is a pair
    (text, flag). The flag of a piece is True for a word or number, and False for an operator or
    bracket. Commas, hyphens within words and other punctuation are omitted."""
    plain = _LAYOUT.sub(" ", text.translate({0x2212: "-", 0x2013: "-", ord("$"): ""}))
    plain = _HYPHEN.sub(" ", _GROUP.sub(r" \1 ", plain))
    return [
        (match[0], match["word"] is not None)
        for match in _PIECE.finditer(plain.casefold())
        # keeps < + = | and other symbols of mathematics
        if match["other"] is None or unicodedata.category(match[0]) == "Sm"
    ]


def words(text: str) -> tuple[str, ...]:
    """Returns a text's words, numbers and operators (see `pieces`). Omits an = sign at the end of
    the text."""
    found = [piece for piece, _ in pieces(text)]
    return tuple(found[:-1] if found[-1:] == ["="] else found)  # 2+2= asks for 2+2


class Repeats(NamedTuple):
    """Result of `without_repeats`, which divides a list of problems into three groups. A problem is
    a pair (prompt, answer). Each field of `Repeats` describes one group by the positions of the
    group's problems in the list, counted from 0.

    `kept`: positions of the problems that stay.
    `repeated`: positions of problems with the same prompt and the same answer as a kept problem.
    `contradicted`: positions of problems whose prompt occurs with different answers.
    """

    kept: list[int]
    repeated: list[int]
    contradicted: list[int]


def without_repeats(problems: Iterable[tuple[str, str]]) -> Repeats:
    """Removes repeated problems. Two prompts count as the same prompt if they contain the same
    words and operators in the same order. If several problems have the same prompt and the same
    answer, this function keeps only the first of these problems. If problems with the same prompt
    have different answers, this function keeps none of these problems, because at least one of the
    answers must be wrong.

    If a prompt contains no words and no operators, the whole prompt text is compared instead.
    """
    places: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for at, (prompt, answer) in enumerate(problems):
        places.setdefault(words(prompt) or (prompt,), []).append((at, answer.strip()))
    kept, repeated, contradicted = [], [], []
    for found in places.values():
        if len({answer for _, answer in found}) > 1:
            contradicted += [at for at, _ in found]
        else:
            kept.append(found[0][0])
            repeated += [at for at, _ in found[1:]]
    return Repeats(sorted(kept), sorted(repeated), sorted(contradicted))


class Contamination:
    """Evaluation problems, which must not occur in the training data.

    Args:
        problems: problems of the evaluation.
        ngram: number of consecutive words, at least 1. Two problems match if they share a sequence
            of `ngram` words, including the operators between these words. Problems with fewer words
            are compared as a whole.
    """

    def __init__(self, problems: Iterable[str], ngram: int = NGRAM) -> None:
        self._ngram = ngram
        self._whole: set[tuple[str, ...]] = set()
        self._grams: set[int] = set()
        for problem in problems:
            self._whole.add(words(problem))
            self._grams.update(map(hash, _grams(pieces(problem), ngram)))

    def has(self, prompt: str) -> bool:
        """Returns True if a training problem equals an evaluation problem, or shares `ngram`
        consecutive words with an evaluation problem."""
        return words(prompt) in self._whole or any(
            hash(gram) in self._grams for gram in _grams(pieces(prompt), self._ngram)
        )


def _grams(found: Sequence[tuple[str, bool]], ngram: int) -> Iterator[tuple[str, ...]]:
    """Yields every sequence of `ngram` consecutive words. Each sequence also contains the operators
    and brackets between its words."""
    places = [at for at, (_, is_word) in enumerate(found) if is_word]
    for first, last in zip(places, places[ngram - 1 :], strict=False):
        yield tuple(piece for piece, _ in found[first : last + 1])
