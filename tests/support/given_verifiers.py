"""Verifiers of a test of what verifiers are given, apart from it: workers start without torch."""

from __future__ import annotations

from typing import Any


def within(response: str, answer: str, *, columns: dict[str, Any], bonus: float = 0.0) -> float:
    return float(len(response) <= columns["limit"]) + bonus


def maybe(response: str, answer: str, *, columns: dict[str, Any] | None = None) -> float:
    return float(bool(columns))


def rarest(responses: list[str], answer: str, *, columns: dict[str, Any] | None = None) -> Any:
    """Pays a right response the more, the fewer there are; with a column, only then."""
    right = [each == answer for each in responses]
    return [each / sum(right) if each else 0.0 for each in right]


def one_too_few(responses: list[str], answer: str) -> list[float]:
    return [1.0] * (len(responses) - 1)


def not_numbers(responses: list[str], answer: str) -> list[Any]:
    return [1.0, "no", *[0.0] * (len(responses) - 2)]
