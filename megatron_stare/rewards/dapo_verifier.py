r"""Implements DAPO's rule: compares the text after the last 'Answer:' of a response with the
reference.

Answer and reference are normalised as in Minerva (Lewkowycz et al., arXiv 2206.14858, appendix
D.1). The lists of words that are removed or replaced come from DAPO (arXiv 2503.14476). The
normalised texts must be equal, character by character. The verifier reads only the last 300
characters of a response.

This verifier gives a right answer the reward 1 and a wrong answer the reward 0. DAPO itself gives a
right answer 1 and a wrong answer -1. Rewards of 1 and 0 give the same advantages as rewards of 1
and -1. DAPO's two rewards are 2 apart, and this verifier's two rewards are only 1 apart. Any term
that DAPO adds to the reward must therefore be halved if this verifier is used. For the overlong
punishment, set `overlong.factor: 0.5`. Runs in reward workers.
"""

from __future__ import annotations

import re

_SEEN = 300  # number of characters that count, at the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# applied in this order: articles, dollars, spaces, and three synonyms
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    r"\ldots",
    *(
        "sue",
        "points",
        "feet",
        "minutes",
        "digits",
        "cents",
        "degrees",
        "cm",
        "gm",
        "pounds",
        "meters",
        "meals",
    ),
    *("edges", "students", "childrentickets", "multiples"),
    *(
        r"\text{s}",
        r"\text{.}",
        "\\text{\ns}",
        r"\text{}^2",
        r"\text{}^3",
        "\\text{\n}",
        r"\text{}",
        r"\mathrm{th}",
    ),
    *(r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    ("Adding up.\nAnswer: 34", "34", 1.0),
    ("Answer: $34$", "34", 1.0),
    ("Answer: 1,234 dollars", "1234", 1.0),
    (r"Answer: \frac12", r"\frac{1}{2}", 1.0),
    (r"Answer: $x = \text{5}$", "5", 1.0),
    ("Answer: 33\nAnswer: 34", "34", 1.0),
    ("Answer: 34\nAnswer: 33", "34", 0.0),
    ("The answer is 34", "34", 0.0),
    (r"\boxed{34}", "34", 0.0),
    ("Answer: 0.5", r"\frac{1}{2}", 0.0),
)


def verify(response: str, answer: str) -> float:
    """Returns 1.0 if the normalised text after the last 'Answer:' equals the normalised answer,
    else 0.0."""
    found = _ANSWER.findall(response[-_SEEN:])
    return float(bool(found) and normalised(found[-1]) == normalised(answer))


def answer_start(response: str) -> int:
    """Returns the position of the response's last 'Answer:', as a character index. Returns -1 if
    the last 300 characters contain no 'Answer:'."""
    before = max(0, len(response) - _SEEN)
    starts = [found.start() for found in _ANSWER.finditer(response, before)]
    return starts[-1] if starts else -1


def normal_answer(response: str) -> str:
    """Returns the text after the last 'Answer:' of a response, normalised by `normalised`. Returns
    "" if the last 300 characters of the response contain no 'Answer:'."""
    found = _ANSWER.findall(response[-_SEEN:])
    return normalised(found[-1]) if found else ""


def normalised(text: str) -> str:
    """Removes everything up to and including the last '=' of an answer. Also removes units,
    articles, font commands and spaces from the answer. Writes fractions, roots and large integers
    in a uniform notation."""
    text = text.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for old in _REMOVED:
        text = text.replace(old, "")
    # only the text between a line's first two dollars counts
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for font in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{font}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()
