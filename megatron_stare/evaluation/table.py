"""The results of several tasks as a table of text: a row a figure, a column a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BESIDE = (  # key of the record, what it is called, how it is written
    ("greedy", "greedy", ".3f"),
    ("full_solve", "all responses right", ".3f"),
    ("distinct_answers", "distinct answers", ".2f"),
    ("distinct_solutions", "distinct right solutions", ".2f"),
    ("length_mean", "tokens a response", ",.1f"),
    ("truncated", "cut off at the limit", ".3f"),
)


def table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Lines of a table, intervals of 95 % in brackets."""
    rows: dict[str, dict[str, str]] = {"problems": {}, "responses a problem": {}}
    for task, record in records.items():
        rows["problems"][task] = str(record["problems"])
        rows["responses a problem"][task] = str(record["decoding"]["samples"])
        for name, each in record["results"].items():
            rows.setdefault(name, {})[task] = f"{each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}]"
    for key, name, form in _BESIDE:
        for task, record in records.items():
            if record.get(key) is not None:
                rows.setdefault(name, {})[task] = format(record[key], form)
    for task, record in records.items():
        for category, mean in record["reflection"].items():
            rows.setdefault(f"{category} words a response", {})[task] = f"{mean:.2f}"
        if record["failures"]:
            rows.setdefault("responses not verified", {})[task] = str(record["failures"])
    width = max(map(len, rows))
    widths = {task: max(len(task), *(len(cells.get(task, "-")) for cells in rows.values())) for task in records}
    lines = [" " * width + "".join(f"  {task:>{widths[task]}}" for task in records)]
    for name, cells in rows.items():
        lines.append(f"{name:<{width}}" + "".join(f"  {cells.get(task, '-'):>{widths[task]}}" for task in records))
    return "\n".join(lines)
