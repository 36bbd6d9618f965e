"""One line of what the doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault"]


@dataclass(frozen=True)
class Finding:
    """Result of one check: what was looked at, what was seen, and, unless it is ok, what to do.

    subject: what it is about, such as 'open files'; a node's name before it where there are
    several.
    level: a fault ends or spoils a run; a warning may cost time, or matters on some clusters alone.
    """

    subject: str
    level: Level
    seen: str
    mend: str = ""

    def of(self, node: str) -> Finding:
        """The same, of a node."""
        return Finding(f"{node}: {self.subject}", self.level, self.seen, self.mend)


def ok(subject: str, seen: str) -> Finding:
    return Finding(subject, "ok", seen)


def warning(subject: str, seen: str, mend: str) -> Finding:
    return Finding(subject, "warning", seen, mend)


def fault(subject: str, seen: str, mend: str) -> Finding:
    return Finding(subject, "fault", seen, mend)
