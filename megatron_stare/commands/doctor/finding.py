"""Findings of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    `subject`: the checked item, such as 'open files', prefixed by the node's name in a cluster.
    `level`: 'ok', 'warning' or 'fault'. A fault is a problem that ends or spoils a run. A warning
        is a problem that can cost time, or that matters only on some clusters.
    `seen`: the observed value.
    `mend`: the remedy, or "" if the check found no problem.
    """

    subject: str
    level: Level
    seen: str
    mend: str = ""

    def of(self, node: str) -> Finding:
        """Returns a copy of the finding, with the node's name at the start of `subject`."""
        return Finding(f"{node}: {self.subject}", self.level, self.seen, self.mend)


def ok(subject: str, seen: str) -> Finding:
    return Finding(subject, "ok", seen)


def warning(subject: str, seen: str, mend: str) -> Finding:
    return Finding(subject, "warning", seen, mend)


def fault(subject: str, seen: str, mend: str) -> Finding:
    return Finding(subject, "fault", seen, mend)
