"""Where the time of a step goes: the mean seconds of its phases, for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stare.run_dir.run_files import RunRecord

_ORDER = ("rollout", "reward", "log_probs", "update", "sync")
_BESIDE = ("step", "eval", "checkpoint")  # the whole, and what stands between steps
REST = "the rest"


@dataclass(frozen=True)
class Part:
    """A phase's mean seconds a step, and its share of the step."""

    seconds: float
    share: float


def times(runs: Sequence[RunRecord]) -> list[tuple[str, list[Part | None]]]:
    """Rows of (phase, its part in every run) in the order of a step; [] where no run has any."""
    columns = [_phases(run) for run in runs]
    names = dict.fromkeys(name for name in _ORDER if any(name in column for column in columns))
    names |= dict.fromkeys(name for column in columns for name in column if name != REST)
    if any(REST in column for column in columns):
        names[REST] = None
    return [(name, [column.get(name) for column in columns]) for name in names]


def _phases(run: RunRecord) -> dict[str, Part]:
    """The first step is left out where there are others: it warms up."""
    rows = run.metrics[1:] or run.metrics
    sums: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("time/") and math.isfinite(value):
                name = key.removeprefix("time/").removesuffix("_s")
                sums[name] = sums.get(name, 0.0) + value
    whole = sums.get("step", 0.0)
    parts = {name: value for name, value in sums.items() if name not in _BESIDE}
    if not parts or not whole:
        return {}
    parts[REST] = max(0.0, whole - sum(parts.values()))
    return {name: Part(value / len(rows), value / whole) for name, value in parts.items()}
