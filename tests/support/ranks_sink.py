"""A sink that writes down which calls the ranks are in while responses are sampled."""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.run_dir.heartbeat import FOLDER_VARIABLE, RANK, beats_of

FILE = "ranks.json"


class RanksAt(Sink):
    """FILE in the run's folder: by phase, the calls that each rank was seen in, at its begin and
    with each response."""

    def __init__(self, *args: object) -> None:
        self._file, self._phase = Path(), ""
        self._seen: dict[str, dict[str, list[str]]] = {}

    def start(self, run: RunOutline) -> None:
        self._file = run.dir / FILE

    def begin_phase(self, name: str) -> None:
        self._phase = name
        self._look()

    def progress(self, done: int, total: int) -> None:
        self._look()

    def end_phase(self, name: str) -> None:
        if name == "update":  # the driver waits for it, and nobody could look in between
            self._file.write_text(json.dumps(self._seen))

    def _look(self) -> None:
        seen = self._seen.setdefault(self._phase, {})
        for beat in beats_of(Path(os.environ[FOLDER_VARIABLE])):
            if beat.role.startswith(RANK):
                calls = seen.setdefault(beat.role, [])
                calls += [beat.phase] * (beat.phase not in calls)
