"""How often a run is started again after a loss, and when; and the file in its directory that says
so of each time.

For the driver, which opens a run again when it has lost a worker, and for the supervisor
(supervision.py), which starts the driver again. So nothing here may import what a run computes
with.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# one line for every restart after a loss, with its reason
RESTARTS_FILE = "restarts.jsonl"


@dataclass(frozen=True)
class RecoveryRule:
    """The section `faults.run` of the configuration, which explains it."""

    attempts: int = 3
    window_steps: int = 10
    back_off_s: float = 2.0
    longest_back_off_s: float = 300.0

    @classmethod
    def of(cls, section: Any) -> RecoveryRule:
        """Rule of a section: its model, or what was read of a config.yaml. Fields left out keep
        their defaults."""
        values = section if isinstance(section, dict) else vars(section)
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


class Attempts:
    """The restarts of one run, as one process counts them.

    A restart counts until the run has come `window_steps` steps beyond the furthest it had come
    before it. Steps that are only made again are no progress: a run that always dies before its
    next checkpoint ends.
    """

    def __init__(self, rule: RecoveryRule) -> None:
        self.rule = rule
        self.furthest = 0  # the last step of all before a loss
        self._reached: list[int] = []  # the furthest step at each restart that counts

    @property
    def counting(self) -> int:
        """Restarts that count now."""
        return len(self._reached)

    def lost(self, step: int) -> float | None:
        """The run was lost after so many steps. Seconds until it is started again, which then
        counts as one more restart; None: it is not."""
        rule = self.rule
        self.furthest = max(self.furthest, step)
        self._reached = [
            reached for reached in self._reached if self.furthest - reached < rule.window_steps
        ]
        before = len(self._reached)
        if before >= rule.attempts:
            return None
        self._reached.append(self.furthest)
        return min(rule.back_off_s * 2.0**before, rule.longest_back_off_s)


def note_restart(run_dir: Path, by: str, why: str, step: int, wait_s: float) -> None:
    """Adds a line to the run's restarts.jsonl; on disk, as far as this process goes, when it
    returns.

    Args:
        by: driver, or supervisor.
        step: the last that was finished.
        wait_s: until the start, seconds.
    """
    record = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "by": by,
        "step": step,
        "wait_s": wait_s,
        "why": why,
    }
    line = f"{json.dumps(record)}\n".encode()
    file = os.open(run_dir / RESTARTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def restarts_of(run_dir: Path) -> int:
    """How often a run was started again after a loss."""
    try:
        return (run_dir / RESTARTS_FILE).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
