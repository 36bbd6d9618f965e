"""What the driver has asked of engines, and how these stand: one small file in the node's memory, for the black box.

Written about once a second while requests are under way, and less often where that would cost more than a hundredth of
the event loop's time. Nobody watches, nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.run_dir.heartbeat import FOLDER_VARIABLE, REQUESTS, write_whole

EVERY_S, SHARE = 1.0, 100.0  # between two pages; and of what the last one took
OLDEST = 5  # requests of each engine that are named


class RequestsPage:
    """`write` is due `wait_s` after something has changed."""

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._file = None if not folder else Path(folder) / REQUESTS
        self._next = 0.0

    def wait_s(self) -> float | None:
        """Seconds until the page is to be written, where something has changed; None: nobody reads it."""
        return None if self._file is None else max(0.0, self._next - time.monotonic())

    def write(self, states: Sequence[str], given: Mapping[str, tuple[int, float, int, int]]) -> None:
        """Replaces the page.

        Args:
            states: of the engines, in order.
            given: of each request under way: the engine, when it was given, seconds of CLOCK_MONOTONIC, prompt, sample.
        """
        begun = time.monotonic()
        if self._file is None:
            return
        replicas: list[dict[str, Any]] = [
            {"number": number, "state": state, "under_way": 0, "oldest": []} for number, state in enumerate(states)
        ]
        for replica, when, prompt, sample in given.values():
            replicas[replica]["under_way"] += 1
            replicas[replica]["oldest"].append((when, prompt, sample))
        for each in replicas:
            each["oldest"] = [(prompt, sample, when) for when, prompt, sample in sorted(each["oldest"])[:OLDEST]]
        with contextlib.suppress(OSError):
            write_whole(self._file, {"replicas": replicas})
        took = time.monotonic() - begun
        self._next = begun + max(EVERY_S, SHARE * took)
