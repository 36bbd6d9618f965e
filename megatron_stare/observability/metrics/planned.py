"""Compares the predicted values in a run's metrics with the measured values, for the command
`status` and the report. Needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PHASES = ("rollout", "log_probs", "update", "sync", "step")  # phases whose seconds a plan predicts
MEMORY = ("log_probs", "update")  # phases whose memory a plan predicts
# first steps, which compile kernels and fill caches; left out if there are others
WARM_UP = 2


@dataclass(frozen=True)
class Planned:
    """Predicted and measured value of a metric. For times and lengths, the measured value is the
    median over the steps after the first WARM_UP steps. For memory, the measured value is the
    maximum over all steps."""

    name: str
    unit: str
    planned: float
    measured: float


def planned_and_measured(rows: Sequence[Mapping[str, float]]) -> list[Planned]:
    """Returns the metrics that have a prediction in the newest step and a measurement in any step.

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
