"""Shows the run on the console: as a live panel if the terminal supports one, and otherwise as
plain lines."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_stare.observability.sink import Alert, RunOutline, Sink
from megatron_stare.observability.terminal.live import make_display
from megatron_stare.observability.terminal.progress import RunDisplay
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.run_files import EVAL_FILE, result_name


class Console(Sink):
    """Passes all reports to a display that suits stdout: the live panel or plain lines."""

    def __init__(self) -> None:
        self._opened: RunDisplay | None = None
        self._say_again = False  # the alerts that were active before a resume
        # open phases, outermost first
        self._phases: list[contextlib.AbstractContextManager[None]] = []

    @property
    def _display(self) -> RunDisplay:
        assert self._opened
        return self._opened

    def start(self, run: RunOutline) -> None:
        self._opened = make_display(run.config.run.steps)
        self._display.start(str(run.dir), run.config.algorithm.name)

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        self.start(run)
        self._say_again = True
        self._display.restore(rows)
        for record in read_jsonl(run.dir / EVAL_FILE):
            if int(record["step"]) <= step:
                self._evaluated(record)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        self._display.step(step, metrics)

    def alerts(self, changed: Sequence[Alert], active: Sequence[Alert]) -> None:
        # the lines of the earlier start may be on another terminal
        again = [alert for alert in active if alert not in changed] if self._say_again else []
        self._say_again = False
        self._display.alerts([*again, *changed], active)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._evaluated(record)
        greedy = f", greedy {record['greedy']:.3f}" if record["greedy"] is not None else ""
        result = result_name(dict(record))
        task = f" of {record['task']}" if "task" in record else ""
        self._display.note(
            f"{result} of the {record['weights']} policy on {record['problems']} held-out"
            f" problems{task}: sampled {record['pass1']:.3f}{greedy}{_of_several(record)}"
        )

    def _evaluated(self, record: Mapping[str, Any]) -> None:
        name = result_name(dict(record))
        self._display.evaluated(
            f"{record['task']} {name}" if "task" in record else name,
            record["pass1"],
            record["step"],
        )

    def note(self, text: str) -> None:
        self._display.note(text)

    def begin_phase(self, name: str) -> None:
        phase = self._display.phase(name)
        phase.__enter__()
        self._phases.append(phase)

    def end_phase(self, name: str) -> None:
        self._phases.pop().__exit__(None, None, None)

    def progress(self, done: int, total: int) -> None:
        self._display.rollout_progress(done, total)

    def close(self) -> None:
        if self._opened:
            self._opened.close()


def _of_several(record: Mapping[str, Any]) -> str:
    """Returns a text with pass@k and maj@k for the largest k, or "" if each problem is answered
    only once."""
    told = {
        name.partition("@")[0]: f", {name} {each['value']:.3f}"
        for name, each in record.get("results", {}).items()
    }
    return (
        ""
        if told.get("pass", "").startswith(", pass@1 ")
        else told.get("pass", "") + told.get("maj", "")
    )
