"""Defines the base class of sinks that report to a service. No step and no evaluation is reported
twice, even if the run or the service fails.

The monitor calls the sink. The sinks of W&B and MLflow implement the calls to their services. The
calls to a service run on a separate thread. A resumed run sends the recorded steps and evaluations
that are not yet delivered.
"""

from __future__ import annotations

import importlib.util
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from megatron_stare.errors import ConfigError
from megatron_stare.observability.sink import WHERE, RunOutline, Sink
from megatron_stare.observability.sinks.delivery import Background, Delivered
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.run_files import EVAL_FILE, evaluation_figures

CLOSE_S = 30.0  # for reports still waiting when the run ends


def need(package: str, sink: str) -> None:
    """Raises ConfigError if an optional package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"the sink {sink!r} needs the package {package}, which is not installed",
            where=WHERE,
            fix=f"pip install 'megatron_stare[{sink}]', or leave this sink out",
        )


class Service(Sink):
    """Implements the behaviour that the sinks of all services share.

    `name`: name of the sink.
    `package`: import name of the package that the sink needs.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(self) -> None:
        need(self.package, self.name)
        self._background: Background | None = None

    def look(self, run: RunOutline, delivered: Delivered) -> None:
        """Removes from `delivered` all entries that the service did not receive. `look` is called
        before `open`, but only if an earlier session of the run has already used the service."""

    @abstractmethod
    def open(self, run: RunOutline, delivered: Delivered) -> None:
        """Begins or continues the run in the service. An error in `open` normally ends the run. If
        the run resumed automatically, after the loss of a process or after a rollback, an error in
        `open` does not end the run: the run continues without the sink."""

    @abstractmethod
    def send(self, step: int, figures: Mapping[str, float]) -> None:
        """Sends the metrics of a step or an evaluation. `figures` contains only finite values."""

    @abstractmethod
    def end(self, finished: bool) -> None:
        """Ends the run in the service. `finished` is True if the run made all its steps."""

    def start(self, run: RunOutline) -> None:
        self._begin(run, 0, [])

    def resume(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        self._begin(run, step, rows)

    def step(self, step: int, metrics: Mapping[str, float], batch: RolloutBatch) -> None:
        self._call(lambda: self._step(step, metrics))

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._call(lambda: self._evaluation(record))

    def finish(self, run: RunOutline) -> None:
        self._finished = True

    def close(self) -> None:
        background, self._background = self._background, None
        if background is None:
            return
        try:
            background.call(lambda: self.end(self._finished))
        finally:
            if not background.close(CLOSE_S):
                self.abandon()
                raise TimeoutError(
                    f"the service did not take the last reports within {CLOSE_S:g} s"
                )

    def abandon(self) -> None:
        """Kills the processes that a hanging service runs on this machine, because they would keep
        this process alive."""

    def _begin(self, run: RunOutline, step: int, rows: Sequence[Mapping[str, float]]) -> None:
        self._finished = False
        self._delivered = Delivered.read(run.dir / f"{self.name}_delivered.json")
        if self._delivered.starts:
            self.look(run, self._delivered)
        self._delivered.goes_on_after(step)
        self._delivered.starts += 1
        self._delivered.write()
        self.open(run, self._delivered)
        self._background = Background(self.name)
        evaluated = [r for r in read_jsonl(run.dir / EVAL_FILE) if int(r["step"]) <= step]
        if rows or evaluated:
            self._call(lambda: self._catch_up(rows, evaluated))

    def _call(self, function: Any) -> None:
        if self._background:
            self._background.call(function)

    def _catch_up(
        self, rows: Sequence[Mapping[str, float]], evaluated: Sequence[Mapping[str, Any]]
    ) -> None:
        for row in rows:
            self._step(
                int(row["step"]), {key: value for key, value in row.items() if key != "step"}
            )
        for record in evaluated:
            self._evaluation(record)

    def _step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._delivered.step:
            return
        self._delivered.step = step
        self._delivered.write()
        self.send(step, _finite(metrics))

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        step, task = int(record["step"]), str(record.get("task") or "")
        if [step, task] in self._delivered.evaluated:
            return
        self._delivered.evaluated.append([step, task])
        self._delivered.write()
        self.send(
            step,
            _finite(
                {under(task) + name: value for name, value in evaluation_figures(record).items()}
            ),
        )


def under(task: str) -> str:
    """Returns the prefix for the metrics of an evaluation. If `task` is "", the evaluation is the
    run's own evaluation, which has no task name."""
    return f"eval/{task}/" if task else "eval/"


def _finite(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if math.isfinite(value)}
