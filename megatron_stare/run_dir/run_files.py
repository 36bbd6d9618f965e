"""Defines the names of a run's record files, and reads run directories.

`sinks/jsonl_files.py` writes metrics.jsonl and eval.jsonl. On resume, a run reads metrics.jsonl and
eval.jsonl. `figures.py` and `report/` read metrics.jsonl, eval.jsonl and config.yaml. Runs that are
unfinished, killed or never evaluated can be read too.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_stare.config.formats import with_new_names
from megatron_stare.config.rollout_sections import PRECISIONS, coarsest_dtype
from megatron_stare.errors import DataError
from megatron_stare.run_dir.json_lines import Record, read_jsonl

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
ROLLOUTS_DIR = "rollouts"
TENSORBOARD_DIR = "tensorboard"
CONFIG_FILE = "config.yaml"
LOCK_FILE = ".lock"  # held by the driver while it lives
_FIGURES = (
    "full_solve",
    "length_mean",
    "truncated",
    "distinct_answers",
    "distinct_solutions",
    "tool_calls",
    "tool_calls_failed",
)
STARTS_FILE = "starts.jsonl"  # time, place and commit of every start and resume


@dataclass(frozen=True)
class RunRecord:
    """Contents of one run directory."""

    name: str
    directory: Path
    config_text: str
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    evals: Sequence[Record]
    starts: Sequence[Record] = ()

    @property
    def method(self) -> str | None:
        """Name of the run's method."""
        algorithm = self.config.get("algorithm")
        # a string is the short form of the section
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
        return None if name is None else str(name)

    @property
    def supervised(self) -> bool:
        """True if the run's steps have losses and no rewards."""
        return any("loss/policy" in row for row in self.metrics) and not any(
            "reward/mean" in row for row in self.metrics
        )

    @property
    def coarsest_dtype(self) -> str:
        """See the function `coarsest_dtype`."""
        return coarsest_dtype(*map(self.setting, PRECISIONS))

    def setting(self, dotted: str) -> Any:
        """Returns the configuration's value for a dotted key, or None if the key is absent."""
        node: Any = self.config
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Returns the steps and the values of one metric. The value is NaN for a step that lacks
        the metric. If no step has a finite value of the metric, both returned lists are empty."""
        if not any(math.isfinite(row.get(key, math.nan)) for row in self.metrics):
            return [], []
        return [float(row["step"]) for row in self.metrics], [
            row.get(key, math.nan) for row in self.metrics
        ]

    @property
    def tasks(self) -> list[str | None]:
        """Names of the evaluated tasks in order of appearance. The list element `None` stands for
        the run's own task. The list is [None] if there are no evaluations."""
        return list(dict.fromkeys(record.get("task") for record in self.evals)) or [None]

    def on_task(self, task: str | None) -> RunRecord:
        """Returns a copy of this run that contains only the evaluations of one task."""
        return replace(self, evals=[record for record in self.evals if record.get("task") == task])

    @property
    def before(self) -> Record | None:
        """Newest evaluation of the initial weights, or None."""
        return _last(self.evals, "base")

    @property
    def after(self) -> Record | None:
        """Newest evaluation of trained weights, or None."""
        return _last(self.evals, "trained")


def read_run(directory: Path) -> RunRecord:
    """Reads a run directory. Raises DataError if the directory contains no file of a run, or if
    config.yaml is not YAML."""
    directory = Path(directory)
    config_path = directory / CONFIG_FILE
    if not any((directory / name).exists() for name in (CONFIG_FILE, METRICS_FILE, EVAL_FILE)):
        raise DataError(
            f"not a run directory: it holds none of {CONFIG_FILE}, {METRICS_FILE}, {EVAL_FILE}",
            where=str(directory),
        )
    text = config_path.read_text(encoding="utf-8") if config_path.exists() else ""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError("not valid YAML", where=str(config_path)) from error
    config = with_new_names(config) if isinstance(config, dict) else {}
    run = config.get("run")
    name = run.get("name") if isinstance(run, dict) else None
    return RunRecord(
        name=str(name or directory.resolve().name),
        directory=directory,
        config_text=text,
        config=config,
        metrics=_by_step(read_metrics(directory / METRICS_FILE)),
        evals=_once(read_jsonl(directory / EVAL_FILE)),
        starts=read_jsonl(directory / STARTS_FILE),
    )


class Rereading:
    """Reads a run directory repeatedly. Reads the files again only if at least one file has
    changed."""

    def __init__(self) -> None:
        self._stamps: dict[str, tuple[int, int]] | None = None
        self._run: RunRecord | None = None

    def __call__(self, directory: Path) -> RunRecord:
        """Reads the run like `read_run`."""
        stamps = {}
        for name in (CONFIG_FILE, METRICS_FILE, EVAL_FILE, STARTS_FILE):
            with contextlib.suppress(FileNotFoundError):
                found = (directory / name).stat()
                stamps[name] = (found.st_mtime_ns, found.st_size)
        if self._run is None or stamps != self._stamps:
            self._run, self._stamps = read_run(directory), stamps
        return self._run


def read_runs(directories: Sequence[Path]) -> list[RunRecord]:
    """Reads several runs and names each run by its method. If several runs have the same method,
    each name also contains the run's own name. If the names of several runs are still equal, each
    name also contains the name of the run's directory."""
    runs = [read_run(directory) for directory in directories]
    if len(runs) == 1:
        return runs
    names = [[run.method or run.name] for run in runs]
    for more in (lambda run: f", {run.name}", lambda run: f" ({run.directory.resolve().name})"):
        shared = Counter(name[-1] for name in names)
        for name, run in zip(names, runs, strict=True):
            name.append(name[-1] + (more(run) if shared[name[-1]] > 1 else ""))
    return [replace(run, name=name[-1]) for run, name in zip(runs, names, strict=True)]


def _by_step(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # One row per step. If a step was made twice, the later row counts.
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def _once(evals: Sequence[Record]) -> list[Record]:
    # A run killed between an evaluation and a checkpoint evaluates again; the later one counts.
    return list(
        {
            tuple(record.get(key) for key in ("step", "weights", "task")): record
            for record in evals
        }.values()
    )


def result_name(record: Record) -> str:
    """Returns the name of an evaluation's mean result: pass@1, or avg@k for k responses per
    problem."""
    samples = record.get("decoding", {}).get("samples", 1)
    return "pass@1" if samples == 1 else f"avg@{samples}"


def evaluation_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of one evaluation, as a dict from metric name to value. The dict contains
    no confidence intervals and no missing values."""
    found: dict[str, Any] = {name: record.get(name) for name in ("pass1", "greedy", *_FIGURES)}
    found |= {name: each["value"] for name, each in record.get("results", {}).items()}
    found |= {
        f"reflection/{category}": mean for category, mean in record.get("reflection", {}).items()
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _last(evals: Sequence[Record], weights: str) -> Record | None:
    return next((record for record in reversed(evals) if record.get("weights") == weights), None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads all rows of a file metrics.jsonl, in the order of the file. Each row contains the
    metrics of one step. Returns [] if the file does not exist. Drops an incomplete last line.

    "step" is an int. Every value except "step" is a float. All non-finite values are NaN.
    """
    return [
        {"step": int(record["step"])}
        | {
            key: float("nan") if value is None else float(value)
            for key, value in record.items()
            if key != "step"
        }
        for record in read_jsonl(Path(path))
    ]


def evaluated_steps(run_dir: Path) -> set[tuple[int, str | None]]:
    """Returns the steps whose weights were evaluated, each with the name of the task, or with None
    for the run's own task. The result is empty if there is no eval.jsonl."""
    return {(int(record["step"]), record.get("task")) for record in read_jsonl(run_dir / EVAL_FILE)}
