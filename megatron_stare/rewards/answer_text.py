r"""Prepares mathematical answers for a comparison. Removes LaTeX that does not change the meaning
of an answer. Rewrites several notations in one uniform notation, such as 1e5 as a power of ten.
Detects notation that changes the meaning of an answer, but that math-verify ignores. Imports the
standard library only."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"  # a braced group with at most one level of nested groups
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|boldsymbol|underline|boxed|fbox)\s*"
    + _GROUP
)
_COLOUR = re.compile(r"\\(?:color\s*\{[^{}]*\}|textcolor\s*\{[^{}]*\})\s*(?:" + _GROUP + ")?")
_NOISE = re.compile(
    r"\\displaystyle(?![A-Za-z])|\\checkmark|(?<!\\)\\[!;,:\s]|\\q?quad(?![A-Za-z])|~"
    r"|\\p?mod\s*(?:\{\w+\}|\d+)|\(\s*\\(?:bmod|mod)[^()]*\)|(?<=[\d}\s,])[MLR]_\{?\\odot\}?$"
)
_CHOICE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*\([A-Z]\)\s*\}|^\([A-E]\)(?=\s)")
_LABEL = re.compile(r"^\\(?:text|textbf|mathrm)\s*\{[^{}]*:\s*\}")
_EXPONENT = re.compile(r"(?<![\w.\\])([+-]?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d+)(?!\w)")
_COUNTED = re.compile(r"([+-]?[\d.,]+)\s+([A-Za-z][A-Za-z ]*)")
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(?:\\text\s*\{)?(\w+)\}{0,2}")
_CLOCK = re.compile(r"\d{1,2}:\d{2}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z ]*")
_TENS = r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|(\d))"
_NUMBER = re.compile(
    r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)(?:(?:\\times|\\cdot)"
    + _TENS
    + r")?|([+-]?)"
    + _TENS
)
_TERM = r"\s*(?:\{([+-]?\d+)\}|(\d))"  # of \frac: {12}, {-1} or a digit without braces
_QUOTIENT = re.compile(r"([+-]?)(?:\\[dt]?frac" + _TERM + _TERM + r"|(\d+)\s*/\s*(\d+))")
_DIGITS = 100  # maximum number of digits in each part of a quotient
_UNIT = re.compile(r"\\(?:text|mathrm|textrm|mbox|operatorname)\{[^{}]*\}(?:\^\{?-?\d\}?)?$")
_RELATION = r"(\\leq?|\\geq?|<|>|\\lt|\\gt)"
_ABOVE_OR_BELOW = re.compile(r"([A-Za-z])" + _RELATION + r"(?![A-Za-z])(.+)")
_BETWEEN = re.compile(r"(.+?)" + _RELATION + r"([A-Za-z])" + _RELATION + r"(?![A-Za-z])(.+)")
_OR = re.compile(r"\\text\{or\}|\\(?:lor|vee)|\\cup")
_HEDGE = re.compile(
    r"\\text\s*\{[^{}]*\b(?:or|and|not|maybe|perhaps|about|roughly|than|least|most)\b[^{}]*\}"
)


def bare(text: str) -> str:
    r"""Removes text that a comparison of answers must ignore: dollar signs, spacing, fonts,
    colours, labels, check marks, a modulus such as \pmod{7}, and a full stop at the end. If an
    answer contains a multiple-choice letter and a value, such as (B) 12, `bare` also removes the
    letter. Also rewrites numbers such as 1e5 as powers of ten."""
    text = text.replace("\\$", "").replace("$", "").replace("\u2212", "-").replace("\0", "").strip()
    text = _COLOUR.sub(lambda found: found[1] or "", text)
    text = _LABEL.sub("", text)
    text = _NOISE.sub(" ", re.sub(r",\\!", "", text)).strip()
    while (found := _WRAPPED.fullmatch(text)) or (
        len(text) > 1 and (found := re.fullmatch(_GROUP, text))
    ):
        text = found[1].strip()
    rest = _CHOICE.sub("", text, count=1).strip()
    text = rest or text
    text = re.sub(r"(?:(?<=[^.])\.|\\text\s*\{\s*\.\s*\})$", "", text).strip()
    text = _EXPONENT.sub(r"\1\\times 10^{\2}", text)
    if found := _COUNTED.fullmatch(text):
        text = rf"{found[1]}\text{{ {found[2]}}}"
    return re.sub(r"(?<=[0-9A-Fa-f])_\{?10\}?$", "", text)


def without_fonts(text: str) -> str:
    r"""Replaces \text{...}, \mathbf{...} and similar commands by their content. Removes at most two
    levels of nested commands."""
    return _WRAPPED.sub(r"\1", _WRAPPED.sub(r"\1", text))


def plain(text: str) -> str:
    r"""Reduces an answer to the characters that matter for a comparison. Replaces a font command
    such as \mathbf{x} by the text in the braces. Replaces \dfrac and \tfrac by \frac. Removes
    spaces and the commands \left and \right."""
    text = without_fonts(text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text.replace(r"\left", "").replace(r"\right", ""))
    return re.sub(r"\s+", "", text)


def tidy(text: str) -> str:
    """Reduces an answer in the same way as `plain`, but keeps the space between a LaTeX command and
    a following letter. The result is therefore still valid LaTeX."""
    text = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\0", without_fonts(text))
    return plain(text).replace("\0", " ")


def number(text: str) -> Decimal | None:
    """Returns the value of a number that is written in digits. The number may contain commas that
    separate thousands, and may be followed by a power of ten and a unit. Returns None for any other
    text."""
    text = _UNIT.sub("", re.sub(r"\s+|\\left|\\right", "", text))
    if (
        not any(map(str.isdigit, text))
        or len(text) > 60
        or not (found := _NUMBER.fullmatch(text.replace("{,}", ",")))
    ):
        return None
    power = next((found[n] for n in (2, 3, 5, 6) if found[n]), "0")
    digits = f"{found[4]}1" if found[1] is None else found[1].replace(",", "")
    if not any(map(str.isdigit, digits)) or len(power) > 5:
        return None
    return Decimal(f"{digits}E{power}")


def quotient(text: str) -> Fraction | None:
    r"""Returns the value of a fraction of two integers, such as 1/2, -\frac12 or \frac{-1}{2}.
    Returns None if the text is not a fraction of two integers, or if the denominator is 0."""
    if not (found := _QUOTIENT.fullmatch(text)):
        return None
    sign, *parts = (part for part in found.groups() if part is not None)
    if max(map(len, parts)) > _DIGITS or not int(parts[1]):
        return None
    value = Fraction(int(parts[0]), int(parts[1]))
    return -value if sign == "-" else value


def exact_value(text: str) -> Fraction | None:
    """Returns the exact value of a number that is written in digits, such as 0.5, or as a fraction
    of two integers, such as 1/2. Returns None for any other text, and for a number whose decimal
    exponent is above 100 or below -100."""
    if (value := number(text)) is not None:
        return Fraction(value) if not value or abs(value.adjusted()) <= _DIGITS else None
    return quotient(text)


def same_number(wanted: Decimal, given: Decimal) -> bool:
    """Compares two numbers. Two integers count as the same number only if they are exactly equal.
    If at least one of the numbers is not an integer, their difference may be at most 1e-6 times the
    smaller of 1 and |wanted|."""
    if wanted == wanted.to_integral_value() and given == given.to_integral_value():
        return wanted == given
    return abs(wanted - given) <= Decimal("1e-6") * min(Decimal(1), abs(wanted))


def intervals(text: str) -> str | None:
    r"""Converts two or more inequalities, such as x < -2 \lor x > 1, to a union of intervals. The
    inequalities must be joined by \text{or}, \lor, \vee or \cup. Returns None for any other
    text."""
    parts = [_interval(part) for part in _OR.split(re.sub(r"\s+|\\left|\\right", "", text))]
    return r"\cup".join(filter(None, parts)) if len(parts) > 1 and all(parts) else None


def _interval(text: str) -> str | None:
    if found := _BETWEEN.fullmatch(text):
        low, left, _, right, high = found.groups()
        if _sign(left) != "<" or _sign(right) != "<":
            return None
        return f"{'[' if 'e' in left else '('}{low},{high}{']' if 'e' in right else ')'}"
    if not (found := _ABOVE_OR_BELOW.fullmatch(text)):
        return None
    _, relation, bound = found.groups()
    closed = "e" in relation
    if _sign(relation) == "<":
        return rf"(-\infty,{bound}{']' if closed else ')'}"
    return rf"{'[' if closed else '('}{bound},\infty)"


def _sign(relation: str) -> str:
    return "<" if relation.startswith(("<", r"\l")) else ">"


def word(text: str) -> str | None:
    """Normalises an answer that consists of words, such as a name or a choice: removes spaces and
    enclosing brackets, and converts to lower case. Returns None for any other answer."""
    text = plain(text).strip("().")
    return text.lower() if _WORDS.fullmatch(text) else None


def one_value(text: str) -> bool:
    r"""Returns True if an answer is a single value without qualifying words such as 'about'. Lists,
    unions and answers with \pm are not single values."""
    return not (hedges(text) or re.search(r",(?!\d{3})|\\cup|\\pm", text))


def hedges(text: str) -> bool:
    r"""Returns True if an answer contains qualifying words, such as 'or' in 3\text{ or 4}.
    math-verify can mistake such words for a unit."""
    return bool(_HEDGE.search(text))


def must_be_written_alike(wanted: str, given: str) -> bool:
    """Returns True if at least one of two answers is a time of day, such as 10:30, or a number with
    a base, such as 101_2. Times of day and numbers with a base must be compared as text.

    math-verify would treat numbers in different bases as equal. math-verify would also treat
    different times of day as equal.
    """
    pair = (plain(wanted), plain(given))
    return any(_CLOCK.fullmatch(text) or _BASE.fullmatch(text) for text in pair)


def alike(wanted: str, given: str) -> bool:
    """Returns True if the function `plain` reduces two answers to the same text. Braces around
    subscripts are ignored."""
    first, second = (re.sub(r"_\{(\w+)\}", r"_\1", plain(text)) for text in (wanted, given))
    return first == second
