r"""How answers are written: units, money, times, lists, sets, tuples, intervals, equations, Unicode
and words.

Right and wrong answers were labelled by hand."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from megatron_stare.rewards import answer_parts, answer_units
from megatron_stare.rewards.math_verifier import equal, verify

PATH = Path(__file__).parents[2] / "assets" / "verification" / "notations.jsonl"
CASES = [json.loads(line) for line in PATH.read_text().splitlines()]


def test_every_label() -> None:
    """But five right answers that math-verify cannot see are, which are said to be so."""
    assert len(CASES) > 600 and 280 < sum(case["label"] for case in CASES) < len(CASES) - 280
    expected = {(c["gold"], c["answer"]): c["label"] and not c.get("refused") for c in CASES}
    got = {(c["gold"], c["answer"]): equal(c["gold"], c["answer"]) for c in CASES}
    assert {case for case in got if got[case] != expected[case]} == set()
    assert sum(bool(case.get("refused")) for case in CASES) == 5


def test_an_answer_is_equal_to_itself_and_a_reference_in_a_box_too() -> None:
    for case in CASES:
        assert equal(case["gold"], case["gold"]), case
        assert verify(rf"\boxed{{{case['gold']}}}", case["gold"]) == 1.0, case


@pytest.mark.parametrize(
    ("text", "value", "kind", "size"),
    [
        ("7", "7", None, 1),
        (r"7\text{ km}", "7", "length", 1000),
        (r"7\,\mathrm{kPa}", "7", "pressure", 1000),
        (r"7\,\mathrm{mF}", "7", "farad", Fraction(1, 1000)),
        (r"7\,\mathrm{mH}", "7", "henry", Fraction(1, 1000)),
        (r"7\text{ cm}^2", "7", "length^2", Fraction(1, 10**4)),
        ("7 square feet", "7", "length^2", Fraction(3048, 10**4) ** 2),
        (r"7\text{ m/s}", "7", "length / time", 1),
        ("7 miles per hour", "7", "length / time", Fraction(1609344, 3600 * 1000)),
        (r"7\text{ cents}", "7", "money", Fraction(1, 100)),
        (r"\$7", "7", "money", 1),
        (r"7^\circ", "7", "angle", 1),
        (r"7^\circ\text{F}", "7", "temperature-f", 1),
        ("7 students", "7", "count", 1),
        ("2 hours 30 minutes", "150", "time of several", 60),
        ("7t", "7t", None, 1),
        ("2 ab", "2 ab", None, 1),
    ],
)
def test_a_quantity(text: str, value: str, kind: str | None, size: Fraction) -> None:
    assert answer_units.quantity(text) == answer_units.Quantity(value, kind, Fraction(size))


@pytest.mark.parametrize(
    "text",
    [
        r"7\text{ squared}",
        r"7\text{ dozen}",
        "7 halves",
        r"7\text{ or more}",
        r"7\text{ PM}",
        "7 times",
    ],
)
def test_words_that_change_a_number_are_no_unit(text: str) -> None:
    assert answer_units.quantity(text) is None


def test_units_agree_or_do_not() -> None:
    def factor(wanted: str, given: str) -> Fraction | None:
        one, other = answer_units.quantity(wanted), answer_units.quantity(given)
        assert one is not None and other is not None
        return answer_units.agree(one, other)

    assert factor(r"5\text{ m}", r"500\text{ cm}") == Fraction(1, 100)
    assert factor(r"5\text{ m}", "5") == factor("5", r"5\text{ m}") == 1
    assert factor(r"5\text{ m}", r"5\text{ s}") is None
    assert factor(r"5\text{ m}", r"5\text{ m}^2") is None
    assert factor("5", "1 hour 5 minutes") is None  # which of the two would it be in?
    assert factor(r"65\text{ minutes}", "1 hour 5 minutes") == 1
    assert factor("5 ways", "5 arrangements") == 1
    assert (
        factor(r"5\text{ units}", r"5\text{ cm}") is None
        or factor(r"5\text{ units}", r"5\text{ cm}") == 1
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("√2", r"\sqrt{2}"),
        ("√(x+1)", r"\sqrt{x+1}"),
        ("x²y⁻¹", "x^{2}y^{-1}"),
        ("½", r" \frac{1}{2}"),
        ("a₁", "a_1"),
        (r"0.1\overline{6}", r"\frac{15}{90}"),
        (r"0.\dot{1}2\dot{3}", r"\frac{123}{999}"),
        ("2.5 million", r"2.5\times 10^{6}"),
        (r"\sin 30^\circ", r"\sin (30\cdot\pi/180)"),
        (r"30^\circ", r"30^\circ"),
        ("＋５", "+5"),
    ],
)
def test_what_is_read_as_what(text: str, wanted: str) -> None:
    assert answer_parts.readable(text) == wanted


def test_times_of_day() -> None:
    clock = answer_parts.Clock
    assert answer_parts.clock("7:30 p.m.") == clock(7, 30, 0, "p")
    assert answer_parts.clock(r"7{:}30\text{ AM}") == clock(7, 30, 0, "a")
    assert answer_parts.clock("07:30:15") == clock(7, 30, 15, None)
    assert answer_parts.clock("3 PM") == clock(3, 0, 0, "p")
    assert answer_parts.clock("3:4") is None and answer_parts.clock("3") is None
    assert equal("7:30", "7:30 PM") and not equal("7:30 PM", "7:30")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("(1, {2})", ["1", "{2}"]),
        (r"(\{1\}, 2)", [r"\{1\}", "2"]),
        ("(1, 2})", None),  # not opened
        ("(1, 2{)", None),  # not closed
        (r"(\(1, 2)", None),
    ],
)
def test_a_tuple_has_brackets_that_open_and_close(text: str, parts: list[str] | None) -> None:
    found = answer_parts.bracketed(text)
    assert (found.parts if found else None) == parts
