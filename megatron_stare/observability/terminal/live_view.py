"""What is known of a run at one moment.

Comes from `live.py`, which gathers what the driver says; goes to `live_panel.py`, which draws it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_stare.observability.sink import Alert

MAX_WIDTH = 160  # of the panel, characters; wider, the eye loses the line
PHASES = ("rollout", "reward", "log_probs", "update", "sync", "eval", "checkpoint")
SERIES = (
    "entropy/mean",
    "entropy/target",
    "stare/gate",
    "reward/mean",
    "response/length_mean",
    "perf/tokens_per_s",
    "optimizer/grad_norm",
    "response/truncated",
    "group/degenerate",
)


@dataclass(frozen=True)
class View:
    """A run at one moment.

    series: the latest values of every metric in SERIES, oldest first, NaN where a step lacked it.
    seconds: of every phase, the newest known.
    phase, phase_s: the phase under way and how long it has been; "" between phases.
    responses: finished and wanted in this phase; None where nobody counts.
    left_s, run_s: until the last step, and since the display started.
    over: alerts that ended, newest last.
    evaluated: the newest result of every task, as (name, value, step).
    closed: "" while the run goes on, else how it ended.
    """

    total: int
    step: int = 0
    run_dir: str = ""
    algorithm: str = ""
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    phase: str = ""
    phase_s: float = 0.0
    responses: tuple[int, int] | None = None
    left_s: float | None = None
    run_s: float = 0.0
    active: Sequence[Alert] = ()
    over: Sequence[Alert] = ()
    evaluated: Sequence[tuple[str, float, int]] = ()
    closed: str = ""
    shaded: bool = True  # the terminal has enough colours for a shaded band

    def values(self, key: str) -> Sequence[float]:
        """A series; empty where no step had a value."""
        values = self.series.get(key, ())
        return values if any(map(math.isfinite, values)) else ()
