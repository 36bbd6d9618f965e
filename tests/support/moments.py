"""Has a run in this process be met at chosen moments, where something is done to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def at(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, calls: dict[int, Callable[[], None]]
) -> Callable[[], int]:
    """Does something before the given calls, counted from 1, of a method of a class. Gives the
    number of calls so far."""
    original, number = getattr(owner, method), 0

    def met(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal number
        number += 1
        if number in calls:
            calls[number]()
        return original(self, *args, **more)

    monkeypatch.setattr(owner, method, met)
    return lambda: number
