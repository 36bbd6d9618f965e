"""The files of a run's record, by name and read back: metrics.jsonl and eval.jsonl of the run directory.

Written by `sinks/jsonl_files.py`; read by the report, by a resume and by anyone with `jq`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_stare.observability.json_lines import read_jsonl

METRICS_FILE = "metrics.jsonl"
EVAL_FILE = "eval.jsonl"
ROLLOUTS_DIR = "rollouts"
TENSORBOARD_DIR = "tensorboard"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a metrics.jsonl, oldest first; [] where there is no file. A torn last line is left out.

    "step" is an int; every other value a float, NaN where the run logged something that is not finite.
    """
    return [
        {"step": int(record["step"])}
        | {key: float("nan") if value is None else float(value) for key, value in record.items() if key != "step"}
        for record in read_jsonl(Path(path))
    ]


def evaluated_steps(run_dir: Path, task: str | None) -> set[int]:
    """The steps whose weights were evaluated on a task (None: the run's own); empty where there is no eval.jsonl."""
    return {int(record["step"]) for record in read_jsonl(run_dir / EVAL_FILE) if record.get("task") == task}
