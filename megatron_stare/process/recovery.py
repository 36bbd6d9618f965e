"""Decides whether and when a run restarts after it lost a worker or its driver. Records each
restart in the run directory.

The driver uses this module to reopen a run after a worker was lost. The supervisor (supervision.py)
uses this module to restart the driver. This module must not import torch or any other library that
only training needs, because the supervisor must run without these libraries.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# one line per restart after a loss, with the reason
RESTARTS_FILE = "restarts.jsonl"


@dataclass(frozen=True)
class RecoveryRule:
    """Settings of the configuration section `faults.run`. docs/configuration.md describes each of
    these settings."""

    attempts: int = 3
    window_steps: int = 10
    back_off_s: float = 2.0
    longest_back_off_s: float = 300.0

    @classmethod
    def of(cls, section: Any) -> RecoveryRule:
        """Makes a RecoveryRule from the settings in `section`. `section` is the configuration
        section `faults.run`, either as a pydantic model or as a dict that was read from a
        config.yaml. Settings that are missing in `section` keep their defaults."""
        values = section if isinstance(section, dict) else vars(section)
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


class Attempts:
    """Counts the restarts of one run within one process.

    When the number of counted restarts is equal to the setting `attempts`, the run is not restarted
    again. The furthest step of a run is the highest step number that the run has finished so far. A
    restart is no longer counted once the run's furthest step has increased by `window_steps` or
    more since this restart. After a restart, the run first repeats the steps after its last
    checkpoint. Repeated steps do not change the furthest step. A process may be lost again after
    every restart, before the run has got past the steps that it repeats. In this case, the run is
    restarted at most `attempts` times in a row.
    """

    def __init__(self, rule: RecoveryRule) -> None:
        self.rule = rule
        self.furthest = 0  # the furthest step before any loss
        self._reached: list[int] = []  # the furthest step at each counting restart

    @property
    def counting(self) -> int:
        """Number of earlier restarts that currently count towards the setting `attempts`."""
        return len(self._reached)

    def lost(self, step: int) -> float | None:
        """Records the loss of a process. The argument `step` is the number of the last finished
        step before the loss. If the run may restart, this method counts the restart and returns the
        seconds to wait before the restart. Otherwise this method returns None."""
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
    """Adds a line to the run's restarts.jsonl. The function returns only when the line is in the
    file.

    Args:
        by: driver or supervisor.
        step: last finished step.
        wait_s: seconds until the restart.
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
    """Returns the number of times that a run was restarted after a process was lost."""
    try:
        return (run_dir / RESTARTS_FILE).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
