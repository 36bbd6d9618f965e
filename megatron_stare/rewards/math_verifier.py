r"""Verifies mathematical answers. Compares the last box of a response with the reference by means
of math-verify.

Only the last box counts, so a policy gains nothing by listing several guesses. Answers in different
notations can be equal, such as 1/2, 0.5 and \frac{1}{2}. math-verify misreads some notations; this
module handles these notations itself before it calls math-verify (see `rewards/answer_text.py`).
Runs in reward workers and does not import torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from decimal import Context

from math_verify import LatexExtractionConfig
from math_verify import parse as parse_math
from math_verify import verify as equal_math

from megatron_stare.rewards import answer_parts, answer_text, answer_units
from megatron_stare.rewards.final_answer import last_box, last_boxed

# math-verify warns once per process that its own time limit is off; rewards/verifier_pool.py sets
# the time limit instead
logging.getLogger("math_verify").setLevel(logging.ERROR)

_DEFAULT = LatexExtractionConfig(boxed_match_priority=0)
# units are handled before, because math-verify would read any text after a number as a unit
_EXTRACTION = (
    replace(_DEFAULT, normalization_config=replace(_DEFAULT.normalization_config, units=False)),
)
_DEEPEST = 6  # maximum depth to which answers are split; a list of named tuples needs four
_LONGEST_LIST = 60
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
# two adjacent numbers, except the base and argument of a logarithm
_SPACED = re.compile(r"(?<![_^\d])\d+(?:\s+|,\s+)\d")
_MIXED = re.compile(
    r"(?<![\w.}^_])(\d+)\s+(\d+/\d+)(?![\d.])|(?<![\w.}^_])(\d+)\s*(\\[dt]?frac\{\d+\}\{\d+\})"
)
_WORDS = re.compile(r"\\(?:text|mathrm|textrm|textbf|mbox)\s*\{[^{}]*[A-Za-z]{2}[^{}]*\}")
# longest answer, in characters, that is parsed as mathematics; the longest reference of MATH-500
# has 159
_LONGEST = 1_000
# a number has at most 60 digits, of which Decimal's own context would keep 28
_EXACT = Context(prec=200)

KNOWN_ANSWERS: tuple[tuple[str, str, float], ...] = (
    (r"So the total is \boxed{42}.", "42", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{\dfrac{\sqrt{8}}{2}}", r"\sqrt{2}", 1.0),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
    (r"\boxed{1,234}", "1234", 1.0),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
    (r"\boxed{\text{(B)}}", r"\text{(B)}", 1.0),
    (r"First \boxed{42}, no: \boxed{41}", "42", 0.0),
    (r"\boxed{41, 42}", "42", 0.0),
    (r"\boxed{(2, 1)}", "(1, 2)", 0.0),
    (r"\boxed{-42}", "42", 0.0),
    ("The answer is 42.", "42", 0.0),
    (r"\boxed{42", "42", 0.0),
    (r"\boxed{}", "42", 0.0),
    (r"\boxed{10}", r"10\%", 1.0),  # math-verify reads this differently with another antlr4
    (r"\boxed{V_1:V_2=11:21}", "11:21", 1.0),
    (r"\boxed{5\text{ km}}", r"5\text{ m}", 0.0),
    (r"\boxed{7\text{ million}}", "7", 0.0),
    (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", 1.0),
)
"""Triples (response, reference, reward) that every worker grades when it starts. math-verify
reports its own failures, such as a wrong parser version, as "not equal". Without this test, such a
failure would look like a policy that never learns."""


def verify(response: str, answer: str) -> float:
    r"""Returns 1.0 if the content of the response's last box equals `answer`, else 0.0.

    This function has no time limit of its own; the reward pool limits the wall-clock time of the
    call. math-verify's own time limit is switched off. math-verify implements its time limit with
    signal.alarm, so a call with this time limit would fail outside the main thread.
    """
    given, wanted = last_boxed(response), last_boxed(answer) or answer
    return float(given is not None and equal(wanted, given))


def equal(wanted: str, given: str) -> bool:
    """Returns True if two answers have the same meaning. `wanted` is the reference. `given` is the
    answer of a response. The form of the reference determines which notations are accepted in the
    response's answer."""
    if len(wanted) > _LONGEST or len(given) > _LONGEST:
        return wanted.strip() == given.strip()
    times = answer_parts.clock(wanted), answer_parts.clock(given)
    if all(times):
        return times[0] == times[1] or (times[0] == replace(times[1], half=None))  # type: ignore[type-var]
    return _same(answer_parts.readable(wanted), answer_parts.readable(given), _DEEPEST)


def _same(wanted: str, given: str, deeper: int) -> bool:
    """Compares two LaTeX answers in the same way as `equal`. `deeper` limits the number of further
    levels on which the answers are split into parts."""
    in_words = r"\text" in wanted
    written = wanted, given  # still with the currency signs that `bare` removes
    wanted, given = answer_text.bare(wanted), answer_text.bare(given)
    if not given or not wanted or not deeper:
        return False
    if (
        answer_text.alike(wanted, given)
        and not any(r"\$" in each for each in written)
        and _spaced(wanted) == _spaced(given)
    ):
        return True  # includes answers that math-verify cannot parse, such as names and choices
    nothings = answer_parts.nothing(wanted), answer_parts.nothing(given)
    if any(nothings):
        return nothings[0] == nothings[1]
    if answer_text.must_be_written_alike(wanted, given):
        return (
            _of_equations(wanted, given, lambda one, other: _same(one, other, deeper - 1)) is True
        )
    if (named := answer_text.word(wanted)) is not None and len(named) > 1:
        # otherwise it may be a product, such as mgh
        if in_words or named == answer_text.word(given):
            return named == answer_text.word(given)
    elif answer_text.one_value(wanted) and answer_text.hedges(given):
        return False
    if (found := _in_parts(wanted, given, deeper)) is not None:
        return found
    return _same_value(wanted, given, *written)


def _in_parts(wanted: str, given: str, deeper: int) -> bool | None:
    """Compares lists, unions, sets, tuples, intervals and equations part by part. Returns True for
    equal answers, False for different answers, and None for answers that cannot be compared part by
    part."""

    def same(one: str, other: str) -> bool:
        return _same(one, other, deeper - 1)

    if r"\begin" in wanted + given:
        return None
    if as_interval := answer_text.intervals(given):
        return same(wanted, as_interval)
    wanted, given = (_MEMBER.sub("", text) for text in (wanted, given))
    unions = answer_parts.union(wanted), answer_parts.union(given)
    if max(map(len, unions)) > 1:
        return _matched(*unions, same)
    brackets = answer_parts.bracketed(wanted), answer_parts.bracketed(given)
    is_set = [bool(bracket and bracket.opened == "{") for bracket in brackets]
    if any(is_set) and re.search(r"\||\\mid|:", wanted + given):  # a set defined by a condition
        return None
    tuples = [
        bracket if bracket and not here else None
        for bracket, here in zip(brackets, is_set, strict=True)
    ]
    lists = [
        (
            [part for each in bracket.parts for part in answer_parts.items(each)]
            if bracket and here
            else answer_parts.items(text)
        )
        for text, bracket, here in zip((wanted, given), brackets, is_set, strict=True)
    ]
    if all(tuples):
        return _same_tuples(tuples[0], tuples[1], same)  # type: ignore[arg-type]
    if max(map(len, lists)) > 1 or any(is_set):
        if not any(tuples):
            return _matched(lists[0], lists[1], same)
        # a tuple may be written without brackets, in the same order
        bracket = tuples[0] or tuples[1]
        assert bracket is not None
        if any(is_set) or (bracket.opened, bracket.closed) != ("(", ")"):
            return False
        one, other = (
            found.parts if found else items for found, items in zip(tuples, lists, strict=True)
        )
        return len(one) == len(other) and all(map(same, one, other))
    return _of_equations(wanted, given, same)


def _same_tuples(
    wanted: answer_parts.Bracketed, given: answer_parts.Bracketed, same: Callable[[str, str], bool]
) -> bool:
    """Compares two tuples or intervals entry by entry. An answer with two entries, such as (1, 2),
    can be a tuple or an interval. Answers with two entries are therefore equal only if their
    brackets are equal. For answers with three or more entries, the brackets are not compared."""
    ends = (wanted.opened, wanted.closed) == (given.opened, given.closed)
    if len(wanted.parts) != len(given.parts) or not (ends or len(wanted.parts) > 2):
        return False
    return all(map(same, wanted.parts, given.parts))


def _matched(wanted: list[str], given: list[str], same: Callable[[str, str], bool]) -> bool:
    """Compares two lists without regard to order. Each entry must occur the same number of times in
    both lists."""
    if len(wanted) != len(given) or len(wanted) > _LONGEST_LIST:
        return False
    left = list(given)
    for part in wanted:
        found = next((n for n, other in enumerate(left) if same(part, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _of_equations(wanted: str, given: str, same: Callable[[str, str], bool]) -> bool | None:
    """Compares two answers if at least one of them is an equation. Returns None if neither answer
    is an equation. Also returns None if both answers are equations, and at least one of the two
    equations does not assign a value to a name."""
    first, second = answer_parts.sides(wanted), answer_parts.sides(given)
    if len(first) == len(second) == 1:
        return None
    one, other = _named(first, same), _named(second, same)
    if len(first) == 1:
        return same(wanted, other[1]) if other else all(same(wanted, side) for side in second)
    if len(second) == 1:
        return one is not None and same(one[1], given)
    if one is None or other is None:
        return None
    return answer_text.alike(one[0], other[0]) and same(one[1], other[1])


def _named(sides: list[str], same: Callable[[str, str], bool]) -> tuple[str, str] | None:
    """Returns the name and the value from an equation such as x = 5 or 5 = x. In a chain such as x
    = 2 + 3 = 5, all values after the name must be equal.

    Returns None if the equation does not assign a value to a name.
    """
    if len(sides) < 2 or not all(sides):
        return None
    if answer_parts.is_name(sides[0]):
        values = sides[1:]
        return (sides[0], values[-1]) if all(map(same, values[1:], values)) else None
    if len(sides) == 2 and answer_parts.is_name(sides[1]):
        return sides[1], sides[0]
    return None


def _same_value(wanted: str, given: str, *written: str) -> bool:
    """Compares two single values with their units.

    Args:
        written: both answers before `answer_text.bare` was applied, still with their currency
            signs. `written` may be omitted if `answer_text.bare` had nothing to remove.
    """
    bare = [re.sub(r"\s*\\?%\s*$", "", text) for text in (wanted, given)]
    percents = [text != rest for text, rest in zip((wanted, given), bare, strict=True)]
    if any(percents):
        if _same_value(*bare):
            return True
        parts = [
            f"({rest})/100" if here else rest for rest, here in zip(bare, percents, strict=True)
        ]
        return percents[0] != percents[1] and _by_math_verify(*parts)
    texts = [
        (_delimited(sign) if any(each in sign for each in (r"\$", "€", "£")) else text)
        for text, sign in zip((wanted, given), written or ("", ""), strict=True)
    ]
    first, second = (answer_units.quantity(_dollar(text)) for text in texts)
    if first is None or second is None or (factor := answer_units.agree(first, second)) is None:
        return False
    one, other = answer_text.bare(first.value), answer_text.bare(second.value)
    if not one or not other or _apart(one) or _apart(other) or (":" in one) != (":" in other):
        return False
    one, other = _MIXED.sub(_sum, one), _MIXED.sub(_sum, other)
    numbers = answer_text.number(one), answer_text.number(other)
    if numbers[0] is not None and numbers[1] is not None:
        converted = _EXACT.divide(_EXACT.multiply(numbers[1], factor.numerator), factor.denominator)
        return answer_text.same_number(numbers[0], converted)
    if factor != 1:
        other = rf"({other})\cdot\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    return _by_math_verify(one, other)


def _dollar(text: str) -> str:
    r"""Cleans an amount of money that starts with the currency sign \$. Keeps the currency sign.
    Removes spaces and math delimiters ($) between the currency sign and the amount. Also removes
    spaces and math delimiters at the end of the text. For example, \$5$ becomes \$5. Returns any
    other text unchanged."""
    return rf"\${_delimited(text[2:])}" if text.startswith(r"\$") else text


def _delimited(text: str) -> str:
    r"""Removes math delimiters ($) and spaces from both ends of a text. An escaped \$ is a currency
    sign, and stays."""
    bare = text.rstrip("$ ")
    if bare.endswith("\\"):
        bare += text[len(bare) : len(bare) + 1]
    return bare.lstrip("$ ").strip()


def _sum(found: re.Match[str]) -> str:
    """Rewrites a mixed number as a sum: 3 1/2 becomes 3 + 1/2."""
    whole, part = (each for each in found.groups() if each)
    return f"({whole}+{part})"


def _apart(text: str) -> bool:
    """Returns True if a text contains words, or two numbers with a space between them, as in '3 4'.
    Such a text must not be read as one number. The caller has already removed the unit from the
    text."""
    return bool(_WORDS.search(text)) or _spaced(text)


def _spaced(text: str) -> bool:
    """Returns True if a space separates two numbers, with or without a comma before the space.
    Examples are '3 4' and '3, 4'. The function ignores spaces between groups of three digits, as in
    '12 000'. The function also ignores the space in a mixed number, as in '3 1/2'."""
    spaced = _SPACED.search(_MIXED.sub(_sum, text))
    return spaced is not None and not re.fullmatch(r"[-+]?\d{1,3}(?:\s\d{3})+(?:\.\d+)?", text)


def _by_math_verify(wanted: str, given: str) -> bool:
    first, second = (
        parse_math(f"\\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
        for text in (wanted, given)
    )
    return bool(equal_math(first, second, timeout_seconds=None, allow_set_relation_comp=True))


def normal_answer(response: str) -> str:
    """Returns a normal form of the last box's content, or "" if the box is empty, missing or not
    closed. The normal form of a number in digits, or of a fraction of two integers, is the exact
    value as text: 0.5 becomes 1/2. The normal form of words is in lower case. For any other answer,
    such as a single letter, `answer_text.bare` and `answer_text.tidy` compute the normal form.
    These two functions remove fonts and spaces, for example."""
    given = last_boxed(response)
    if given is None:
        return ""
    if len(given) > _LONGEST:
        return given.strip()
    text = answer_text.bare(given)
    if (value := answer_text.exact_value(text)) is not None:
        return str(value)
    named = answer_text.word(text)
    return named if named and len(named) > 1 else answer_text.tidy(text)


def answer_start(response: str) -> int:
    r"""Returns the position of the response's last box, as a character index. Returns -1 if the
    last box is missing, empty or not closed."""
    box = last_box(response)
    if not box or not box.content:
        return -1
    return box.start if len(box.content) > _LONGEST or answer_text.bare(box.content) else -1
