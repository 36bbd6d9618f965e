"""Holds that all a run logs stands in docs/metrics.md, for every run and step that the tests
make."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_TESTS = ("my_method/", "own/")  # logged by methods and metrics of the tests' own


@cache
def names() -> frozenset[str]:
    """The names of the page; `<n>` at the end stands for a number, `<tool>` for a tool's name."""
    return frozenset(re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE))


def explained(logged: Iterable[str]) -> None:
    """Fails for a name that is not on the page."""
    unknown = {
        name
        for name in logged
        if not {name, re.sub(r"\d+$", "<n>", name), re.sub(r"(?<=_of_).+$", "<tool>", name)}
        & names()
        and not name.startswith(OF_TESTS)
        and name != "step"
    }
    assert not unknown, (
        f"declare {sorted(unknown)} in METRICS beside what logs them; run tools/make_metric_docs.py"
    )
