r"""Parses mathematical answers. Converts non-ASCII characters to LaTeX commands or other ASCII
text. Recognises names, equations, lists, tuples, sets, intervals, times of day, and statements such
as 'no solution'. Imports the standard library only."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_CHARACTERS = {
    "°": r"^\circ ",
    "º": r"^\circ ",
    "′": "'",
    "’": "'",
    "−": "-",
    "–": "-",
    "—": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "≈": r"\approx ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∞": r"\infty ",
    "∅": r"\emptyset ",
    "⌀": r"\emptyset ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "π": r"\pi ",
    "α": r"\alpha ",
    "β": r"\beta ",
    "γ": r"\gamma ",
    "δ": r"\delta ",
    "ε": r"\epsilon ",
    "θ": r"\theta ",
    "λ": r"\lambda ",
    "μ": r"\mu ",
    "σ": r"\sigma ",
    "τ": r"\tau ",
    "φ": r"\phi ",
    "ω": r"\omega ",
    "…": r"\ldots ",
    "“": '"',
    "”": '"',
}
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_REPEATING = re.compile(
    r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar|overbar|dot)\s*\{?(\d+)\}?(?:(\d)?\\dot\s*\{?(\d)\}?)?"
)
_MILLIONS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_MILLION = re.compile(
    r"(?<![\w.])(\d+(?:\.\d+)?)\s*(?:\\text\s*\{\s*)?("
    + "|".join(_MILLIONS)
    + r")(?![a-z])\s*(?:\})?"
)
_PERCENT = re.compile(r"\s*(?:\\text\s*\{\s*per ?cent\s*\}|(?<=[\d\s}])per ?cent\b)(?!\s*of)")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_NOTHING = {
    "none": {
        *(
            "emptyset",
            "varnothing",
            "empty set",
            "the empty set",
            "no solution",
            "no solutions",
            "no real solution",
        ),
        *(
            "no real solutions",
            "there is no solution",
            "there are no solutions",
            "none",
            "no such number",
            "{}",
        ),
        *(
            "no such numbers exist",
            "no roots",
            "no real roots",
            "no integer solutions",
            "no such integers",
        ),
        "there are no real solutions",
    },
    "undefined": {"undefined", "does not exist", "dne", "not defined", "the limit does not exist"},
    "infinite": {"infinitely many", "infinitely many solutions", "infinite solutions", "infinite"},
    "infinity": {"infinity", "infty", "oo", "+ infty", "+infty", "positive infinity"},
}
_CLOCK = re.compile(
    r"(\d{1,2})\s*(?:\{?:\}?\s*(\d{2}))?(?:\s*\{?:\}?\s*(\d{2}))?\s*([ap])\.?\s?m\.?|(\d{1,2}):(\d{2})(?::(\d{2}))?",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"(?:\\?[A-Za-z]+|\\angle\s*[A-Z]+|\\triangle\s*[A-Z]+|\[?[A-Z]{2,}\]?|\|[A-Z]{2,}\|)"
    r"(?:_\{?\w+\}?)?'*(?:\^\{?-1\}?)?(?:\([A-Za-z0-9](?:,\s*[A-Za-z0-9])*\))?"
)
_FUNCTIONS = re.compile(
    r"\\?(?:sin|cos|tan|log|ln|exp|sqrt|frac|dfrac|tfrac|pi|infty|max|min|gcd|e|i)$"
)


def readable(text: str) -> str:
    """Converts the non-ASCII characters of an answer to LaTeX commands or other ASCII text. The
    conversion covers signs such as ≤, powers such as x², fractions such as ½, and roots such as √2.
    Characters that the conversion does not cover stay unchanged. Words such as million become
    powers of ten, and repeating decimals become fractions. Degrees in trigonometric functions
    become radians."""
    text = _ROOT.sub(_root, text)
    found, raised = [], ""
    for character in text:
        if character in _SUPERSCRIPTS:
            raised += _SUPERSCRIPTS[character]
            continue
        if raised:
            found.append(f"^{{{raised}}}")
            raised = ""
        found.append(_character(character))
    text = "".join(found) + (f"^{{{raised}}}" if raised else "")
    text = re.sub(r"(^|[(\[,])\s*\+\s*\\infty", r"\1\\infty", text)
    text = _REPEATING.sub(_fraction, text)
    text = _PERCENT.sub(r"\\%", text)
    text = _MILLION.sub(lambda each: rf"{each[1]}\times 10^{{{_MILLIONS[each[2]]}}}", text)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"(\1\\cdot\\pi/180)", text)
    return text


def _character(character: str) -> str:
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if character in _SUBSCRIPTS:
        return f"_{_SUBSCRIPTS[character]}"
    if character.isascii():
        return character
    normal = unicodedata.normalize("NFKC", character)
    if unicodedata.category(character) == "No" and "⁄" in normal:  # a fraction in one character
        over, _, under = normal.partition("⁄")
        return rf" \frac{{{over}}}{{{under}}}" if over else character
    return normal if normal.isascii() else character


def _root(found: re.Match[str]) -> str:
    inside = next(part for part in found.groups()[1:] if part is not None)
    index = {"√": "", "∛": "[3]", "∜": "[4]"}[found[1]]
    return rf"\sqrt{index}{{{inside}}}"


def _fraction(found: re.Match[str]) -> str:
    """Converts a repeating decimal, such as 0.1\\overline{6} or 0.\\dot{1}2\\dot{3}, to a
    fraction."""
    whole, before, again = found[1] or "0", found[2], found[3]
    if found[5]:
        again += (found[4] or "") + found[5]
    if max(len(whole), len(before), len(again)) > 30:
        return found[0]
    nines = 10 ** len(again) - 1
    top = int(whole + before) * nines + int(again)
    return rf"\frac{{{top}}}{{{nines * 10 ** len(before)}}}"


def nothing(text: str) -> str | None:
    """Classifies an answer that states no value, such as 'no solution'. Returns "none" (no solution
    or the empty set), "undefined", "infinite" (infinitely many solutions) or "infinity" (plus
    infinity). Returns None if `_NOTHING` does not contain the answer."""
    words = re.sub(r"\\(?:text|mathrm|textbf|mbox)(?![A-Za-z])|[\\${}().!]", " ", text).strip()
    words = re.sub(r"\s+", " ", words.lower())
    if re.sub(r"\s", "", text) in (r"\{\}", "{}"):
        return "none"
    return next((kind for kind, said in _NOTHING.items() if words in said), None)


@dataclass(frozen=True)
class Clock:
    """A time of day. `half` is the letter "a" if the time is am, "p" if the time is pm, and None if
    the answer states neither."""

    hour: int
    minute: int
    second: int
    half: str | None


def clock(text: str) -> Clock | None:
    """Returns the time of day that an answer states, or None if the answer is not a time of day."""
    plain = re.sub(r"\\(?:text|mathrm|mbox|textbf)(?![A-Za-z])|[{}~]|\\[,;:! ]", " ", text).strip()
    found = _CLOCK.fullmatch(re.sub(r"\s+", " ", re.sub(r"\s*:\s*", ":", plain)))
    if not found:
        return None
    hour, minute, second, half, *bare = found.groups()
    if half is None:
        hour, minute, second = bare
    return Clock(int(hour), int(minute or 0), int(second or 0), half.lower() if half else None)


def sides(text: str) -> list[str]:
    """Splits an equation or a chain of equations, such as a = b = c, into a list of its sides. For
    a text that has no equals sign outside brackets, the list contains only the whole text."""
    return [part.strip() for part in split(text, ("=",))]


def is_name(text: str) -> bool:
    """Returns True if a side of an equation names a quantity, and False if the side is a value.
    Examples of names are x, f(x), an angle, V_1:V_2 and (x, y). Examples of values are 5, 2x and
    x+1."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text).strip()
    if text.startswith("(") and text.endswith(")"):
        return all(is_name(part) for part in split(text[1:-1], (",",)))
    text = re.sub(r"\\(?:text|mathrm|mathbf|overline|mbox)\s*\{([^{}]*)\}", r"\1", text)
    if re.fullmatch(r"[A-Za-z][A-Za-z ]+", text):
        return True
    parts = [
        each for part in split(text, (":",)) for each in re.split(r"(?<=[\w})])\s*[-+]\s*", part)
    ]
    return all(
        _NAME.fullmatch(part.strip()) and not _FUNCTIONS.fullmatch(part.strip()) for part in parts
    )


def split(text: str, marks: tuple[str, ...]) -> list[str]:
    """Splits a text wherever one of `marks` occurs outside brackets. If '=' is one of `marks`, the
    text is nevertheless not split at the signs <=, >= and !=."""
    found, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("{", "}"):
            depth += 1 if text[at + 1] == "{" else -1
            at += 2
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        mark = (
            next((mark for mark in marks if text.startswith(mark, at)), None)
            if depth == 0
            else None
        )
        if mark and not (
            mark == "=" and (text[at - 1 : at] in ("<", ">", "!") or text[at + 1 : at + 2] == "=")
        ):
            found.append(text[start:at])
            at += len(mark)
            start = at
        else:
            at += 1
    return [*found, text[start:]]


_JOINED = re.compile(
    r",?\s*\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\}\s*|,?\s+(?:and|or)\s+", re.IGNORECASE
)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def items(text: str) -> list[str]:
    r"""Splits a list without brackets into items at commas, semicolons, 'and' and 'or'. An item
    that contains one \pm becomes two items, one with + and one with -. A number such as 12,000,
    whose commas separate thousands, is not split. A text that is not a list is returned as one
    item."""
    text = _JOINED.sub(",", text)
    if _THOUSANDS.fullmatch(text.strip()):
        return [text]
    if len(equation := sides(text)) == 2 and is_name(equation[0]):  # (x, y) = (1, 2)
        names, values = bracketed(equation[0]), bracketed(equation[1])
        if names and values and len(names.parts) == len(values.parts):
            return [
                f"{name}={value}" for name, value in zip(names.parts, values.parts, strict=True)
            ]
    found = []
    for part in split(text, (",", ";")):
        signs = re.fullmatch(r"(.*?)\\pm(?![A-Za-z])(.*)", part, re.DOTALL)
        if signs and r"\pm" not in signs[2] and r"\mp" not in signs[2]:
            found += [
                f"{signs[1]}+{signs[2]}" if signs[1].strip() else signs[2],
                f"{signs[1]}-{signs[2]}",
            ]
        else:
            found.append(part)
    return [part.strip() for part in found]


@dataclass(frozen=True)
class Bracketed:
    """An answer that is written in brackets, such as (1, 2) or [0, 5), split into its parts.

    `opened`, `closed`: the enclosing brackets. '(' and ')' mean a tuple or an open end of an
        interval. '[' and ']' mean a closed end of an interval. '{' and '}' mean a set.
    `parts`: the entries of the tuple, interval or set, as texts. In the answer, commas or
        semicolons separate the entries.
    """

    opened: str
    closed: str
    parts: list[str]


def bracketed(text: str) -> Bracketed | None:
    """Returns the brackets and parts of a tuple, an interval or a set. Returns None if the answer
    is not a tuple, an interval or a set. Reads ]1,2[ as (1,2)."""
    text = re.sub(r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])\s*", "", text).strip()
    text = (
        text.replace(r"\lbrace", r"\{")
        .replace(r"\rbrace", r"\}")
        .replace(r"\langle", "(")
        .replace(r"\rangle", ")")
    )
    if text.startswith(r"\{") and text.endswith(r"\}"):
        opened, inside, closed = "{", text[2:-2], "}"
    elif len(text) > 2 and text[0] in "([]" and text[-1] in ")][":
        opened, inside, closed = text[0], text[1:-1], text[-1]
        opened, closed = {"]": "("}.get(opened, opened), {"[": ")"}.get(closed, closed)
    else:
        return None
    if not _balanced(inside):
        return None
    parts = [part.strip() for part in split(inside, (",", ";"))]
    return Bracketed(opened, closed, parts) if len(parts) > 1 or opened == "{" else None


def _balanced(text: str) -> bool:
    depth = 0
    for at, character in enumerate(text):
        if character in "{}" and text[at - 1 : at] == "\\":
            continue
        depth += (character in "({") - (character in ")}")
        if depth < 0:
            return False
    return depth == 0


def union(text: str) -> list[str]:
    """Splits a union into its parts. A text that is not a union is returned as one part."""
    return [part.strip() for part in split(text, (r"\cup",))]
