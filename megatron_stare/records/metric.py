"""Description of a logged metric. The file that logs a metric describes it in METRICS, which
tools/make_metric_docs.py collects."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One entry of docs/metrics.md.

    name: name in the log; `<n>` at the end stands for a number.
    unit: nats, tokens, share (0 to 1), 0 or 1, ...
    meaning: quantity that is measured, and over what.
    healthy: range or course in a healthy run, and what a deviation indicates.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
