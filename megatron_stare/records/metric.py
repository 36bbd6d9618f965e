"""Description of a logged metric: in METRICS of the file that logs it, gathered by
tools/make_metric_docs.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One entry of docs/metrics.md.

    name: as it is logged; `<n>` at the end stands for a number.
    unit: nats, tokens, share (0 to 1), 0 or 1, ...
    meaning: what it is, over what.
    healthy: the range or course of a run that is well, and what it is a sign of otherwise.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
