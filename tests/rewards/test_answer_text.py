"""Boxes, numbers and intervals as they are written."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from megatron_stare.rewards.answer_text import bare, intervals, number, quotient, same_number
from megatron_stare.rewards.final_answer import Box, last_box, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {3}", "3"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{1\}", None),
        (r"\boxed 5", "5"),
        (r"$\boxed5$.", "5"),
        (r"\boxed 12.", "12"),
        (r"\boxed", None),
        (r"\fbox{6}", "6"),
        (r"\boxed{6} \fbox{7}", "7"),
        (r"\boxedset{8}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_an_unclosed_box_is_still_the_last():
    assert last_box(r"ab\boxed{1} \boxed{2") == Box(12, None)
    assert last_box("ab") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", "1234.5"),
        (r"3\times 10^{8}", "3E8"),
        (r"-.5", "-0.5"),
        (r"10^{-3}\text{ m}^2", "0.001"),
        (r"-10^2", "-100"),
        ("12,34", None),
        ("1,2", None),
        ("x", None),
        ("-", None),
        (r"10^{999999999}", None),
    ],
)
def test_number(text, value):
    assert number(text) == (None if value is None else Decimal(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1/2", "1/2"),
        ("-10 / 4", "-5/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"\frac12", "1/2"),
        (r"\tfrac 1 2", "1/2"),
        (r"-\dfrac1{12}", "-1/12"),
        (r"\frac{-1}2", "-1/2"),
        (r"-\frac{-1}{+2}", "1/2"),
        (r"\frac{-1}{-2}", "1/2"),
        (r"\frac123", None),
        (r"\frac1{x}", None),
        (r"\frac1", None),
        (r"\frac10", None),
        (r"\frac{1}{-0}", None),
        ("--1/2", None),
        ("1/-2", None),
    ],
)
def test_quotient(text, value):
    assert quotient(text) == (None if value is None else Fraction(value))


def test_integers_are_compared_exactly_and_others_to_a_millionth():
    assert not same_number(Decimal(10**12), Decimal(10**12 + 1))
    assert same_number(Decimal("0.3333333"), Decimal("0.333333"))
    assert not same_number(Decimal("7.5E-7"), Decimal("8.5E-7"))


@pytest.mark.parametrize(
    ("text", "union"),
    [
        (r"x < -2 \text{ or } x \ge 1", r"(-\infty,-2)\cup[1,\infty)"),
        (r"0 \le x < 1 \text{ or } x > 5", r"[0,1)\cup(5,\infty)"),
        (r"x < 2", None),
        (r"2 \text{ or } 3", None),
        (r"1 > x > 0 \text{ or } x > 5", None),
    ],
)
def test_intervals(text, union):
    assert intervals(text) == union


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (r"\text{(C) }", "(C)"),
        (r"\textbf{(C)}\ 12", "12"),
        (r"\color{red}{204}", "204"),
        (r"1.5e-7", r"1.5\times 10^{-7}"),
        (r"x_{10}", "x_{10}"),
        (r"\frac{1}{2}.", r"\frac{1}{2}"),
        (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}"),
    ],
)
def test_bare(text, left):
    assert bare(text) == left
