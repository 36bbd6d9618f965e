"""Describes a logged metric. A module that logs metrics describes them in its constant METRICS.
tools/make_metric_docs.py collects the descriptions of all modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One entry of docs/metrics.md.

    `name`: the metric's name in the log. At the end of a name, `<n>` stands for a number and
        `<tool>` for the name of a tool.
    `unit`: the metric's unit, such as nats or tokens. The unit 'share' means a fraction between 0
        and 1. The unit '0 or 1' means that the metric's value is either 0 or 1.
    `meaning`: the quantity that the metric measures, and the tokens, samples or steps that it
        covers.
    `healthy`: the range of values or the trend in a healthy run, and what a deviation indicates.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
