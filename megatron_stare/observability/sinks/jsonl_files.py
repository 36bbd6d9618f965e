"""Writes the record of a run: metrics.jsonl, eval.jsonl, starts.jsonl and rollouts/ in the run
directory.

The report, a resumed run and users with `jq` read the record. A resumed run first removes from the
record all steps after the step from which it resumes. All files of the record except starts.jsonl
therefore look as if the run had never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from megatron_stare.errors import DataError
from megatron_stare.observability.sink import RunOutline, Sink
from megatron_stare.process.versions import origin
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.json_lines import keep, to_line, write_atomically
from megatron_stare.run_dir.rollout_files import rollout_file, rollout_rows
from megatron_stare.run_dir.run_files import EVAL_FILE, METRICS_FILE, ROLLOUTS_DIR, STARTS_FILE


class JsonlFiles(Sink):
    """Appends a line per step to metrics.jsonl and a line per evaluation to eval.jsonl, and
    regularly writes a file of sampled rollouts.

    Every line is flushed to the operating system, so the line is not lost if the process is killed.
    """

    essential = True

    def __init__(self) -> None:
        self._files: dict[str, IO[str]] = {}

    def start(self, run: RunOutline) -> None:
        """Raises DataError if the directory already contains a run's metrics or evaluations."""
        for path in (run.dir / METRICS_FILE, run.dir / EVAL_FILE):
            if path.exists() and path.stat().st_size:
                raise DataError(
                    "the run directory already holds the metrics of a run",
                    where=str(run.dir),
                    fix="resume that run, or choose another run.dir",
                )
        self._append_to(run, 0)

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        for name in (METRICS_FILE, EVAL_FILE):
            keep(run.dir / name, lambda record: int(record["step"]) <= step)
        for path in (run.dir / ROLLOUTS_DIR).glob("step_*.jsonl"):
            if int(path.stem.removeprefix("step_")) > step:
                path.unlink()
        self._append_to(run, step)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        self._append(METRICS_FILE, {"step": step, **metrics})
        if step % self._every == 0 and (rows := rollout_rows(step, batch.trajectories, self._kept)):
            write_atomically(rollout_file(self._rollouts, step), rows)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._append(EVAL_FILE, record)

    def close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _append_to(self, run: RunOutline, step: int) -> None:
        self._every, self._kept = run.config.run.rollouts_every, run.config.run.rollouts_kept
        self._rollouts: Path = run.dir / ROLLOUTS_DIR
        for name in (METRICS_FILE, EVAL_FILE, STARTS_FILE):
            self._files[name] = (run.dir / name).open("a", encoding="utf-8")
        self._append(STARTS_FILE, {"step": step, **origin()})

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._files[name].write(to_line(record))
        self._files[name].flush()
