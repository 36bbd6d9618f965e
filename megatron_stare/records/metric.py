"""Describes a logged metric. The file that logs a metric describes the metric in METRICS. These
descriptions are collected by tools/make_metric_docs.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One entry of docs/metrics.md.

    `name`: the metric's name in the log. At the end of a name, `<n>` stands for a number and
        `<tool>` for the name of a tool.
    `unit`: the metric's unit: nats, tokens, share (0 to 1), 0 or 1, ...
    `meaning`: the measured quantity, and the tokens, samples or steps over which the quantity is
        measured.
    `healthy`: the range of values or the trend in a healthy run, and what a deviation indicates.
    """

    name: str
    unit: str
    meaning: str
    healthy: str
