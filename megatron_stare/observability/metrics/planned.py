"""Predictions of a run beside its measurements, from its metrics; for `status` and the report. No
torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PHASES = ("rollout", "log_probs", "update", "sync", "step")  # whose seconds a plan gives
MEMORY = ("log_probs", "update")  # whose tensors
# first steps, in which kernels are compiled and caches filled; left out if there are others
WARM_UP = 2


@dataclass(frozen=True)
class Planned:
    """One figure. measured: seconds and tokens as medians over steps, memory as its largest."""

    name: str
    unit: str
    planned: float
    measured: float


def planned_and_measured(rows: Sequence[Mapping[str, float]]) -> list[Planned]:
    """Every figure that the newest step has a prediction of and some step a measurement.

    Args:
        rows: metrics by step.
    """
    if not rows:
        return []
    newest, steady = rows[-1], rows[WARM_UP:] or rows
    found = []
    for phase in PHASES:
        if (taken := _series(steady, f"time/{phase}_s")) and (
            said := newest.get(f"plan/{phase}_s")
        ) is not None:
            found.append(Planned(phase, "s", said, statistics.median(taken)))
    for phase in MEMORY:
        held = _series(rows, f"memory/{phase}_live_mb") or _series(rows, f"memory/{phase}_peak_mb")
        if held and (said := newest.get(f"plan/{phase}_mb")) is not None:
            found.append(Planned(f"memory in {phase}", "MB", said, max(held)))
    lengths, said = _series(steady, "response/length_mean"), newest.get("plan/response_tokens")
    if lengths and said is not None:
        found.append(Planned("response", "tokens", said, statistics.median(lengths)))
    return found


def _series(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
