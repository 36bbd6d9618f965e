"""Reads the status of a run from the run's files. The status contains the run's progress, rates and
alerts, and the command that resumes the run.

`megatron-stare status` uses this module for runs on this machine and for runs on other machines.
The run can be in progress, killed, resumed or finished. The module changes no files and does not
import torch.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_stare.observability.metrics.planned import Planned, planned_and_measured
from megatron_stare.observability.metrics.rules import Watch
from megatron_stare.observability.sink import Alert
from megatron_stare.observability.terminal.progress import RemainingTime
from megatron_stare.process.recovery import RESTARTS_FILE
from megatron_stare.run_dir.json_lines import read_jsonl
from megatron_stare.run_dir.liveness import State, liveness
from megatron_stare.run_dir.run_files import RunRecord, evaluation_figures, read_run, result_name
from megatron_stare.run_dir.run_state import RUN_STATE, complete_checkpoints

RECENT = 20  # steps over which rates are averaged


@dataclass(frozen=True)
class Evaluation:
    """The newest result on a task. If `task` is "", the result is for the run's own task."""

    task: str
    step: int
    result: str
    value: float | None
    greedy: float | None


@dataclass(frozen=True)
class Status:
    """Status of a run at one moment. None or "" means that a value is unknown, unless stated
    otherwise.

    `state`, `host`, `beat_age_s`: see liveness.Liveness.
    `pid`: process id of the driver on `host`.
    `process`: the state of the driver's process, such as "running" or "stopped", when the run's
        watcher last saw the process.
    `phase`, `phase_s`: the phase of the driver, and the seconds since the phase began.
    `limit_s`: seconds within which the phase must make progress.
    `done`, `total`: the number of finished responses of the phase, and the number of responses that
        the phase must finish.
    `step`, `steps`: finished and planned steps.
    `steps_per_h`, `tokens_per_s`, `samples_per_s`: mean rates of the newest steps, not counting the
        time of evaluations and checkpoints. The rates count only tokens and samples that were
        trained on.
    `left_s`: seconds until the last step, estimated from the times of recent steps.
    `planned`: the predicted value and the measured value of each metric that the plan predicts; see
        docs/planning.md.
    `checkpoint`, `checkpoint_age_s`: step and age of the newest complete checkpoint.
    `starts`: number of starts and resumes.
    `resumed_after`, `started`: the step from which the latest start continued, and the date of the
        latest start.
    `restarts`, `restart`: number of automatic restarts after the loss of a process, and the reason
        for the latest restart.
    `alerts`: alerts that are active after the newest step.
    `black_box`: the folder of the newest black-box bundle, or "" if there is no bundle.
    `again`: the command that resumes the run, or "" if the run is running or finished.
    """

    run: str
    name: str
    state: State
    host: str = ""
    pid: int | None = None
    process: str = ""
    beat_age_s: float | None = None
    phase: str = ""
    phase_s: float | None = None
    limit_s: float | None = None
    done: int = 0
    total: int = 0
    step: int = 0
    steps: int | None = None
    steps_per_h: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    planned: Sequence[Planned] = ()
    evaluations: Sequence[Evaluation] = ()
    checkpoint: int | None = None
    checkpoint_age_s: float | None = None
    starts: int = 0
    resumed_after: int | None = None
    started: str = ""
    restarts: int = 0
    restart: str = ""
    alerts: Sequence[Alert] = ()
    black_box: str = ""
    again: str = ""


def status_of(
    run_dir: Path,
    now: float | None = None,
    here: str | None = None,
    read: Callable[[Path], RunRecord] = read_run,
) -> Status:
    """Reads the status of a run.

    Args:
        now: the time, seconds since 1970. None means the current time.
        here: the name of this machine. None means the machine's host name.
        read: reads the run directory.

    Raises:
        DataError: there is no run in this directory, or one of its files is damaged.
    """
    now = time.time() if now is None else now
    run = read(run_dir)
    found = liveness(run, now, here)
    beat, steps = found.beat, run.setting("run.steps")
    step = int(run.metrics[-1]["step"]) if run.metrics else 0
    checkpoints = complete_checkpoints(run_dir)
    newest = checkpoints[-1] if checkpoints else None
    checkpoint = int(newest.name.removeprefix("step_")) if newest else None
    state = found.state
    if state == "finished" and not _whole(run_dir, checkpoint, step):
        state = "dead"  # ended after its last step, before the export
    alive = state == "running"
    first = run.starts[-1] if run.starts else {}
    rates = _rates(run)
    restarts = read_jsonl(run_dir / RESTARTS_FILE)
    return Status(
        run=str(run_dir),
        name=run.name,
        state=state,
        host=found.host,
        pid=beat.pid if beat else None,
        process=beat.process if beat else "",
        beat_age_s=found.beat_age_s,
        phase=beat.phase if beat and alive else "",
        phase_s=max(0.0, now - beat.since) if beat and alive else None,
        limit_s=beat.limit_s if beat and alive else None,
        done=beat.done if beat and alive else 0,
        total=beat.total if beat and alive else 0,
        step=step,
        steps=steps if isinstance(steps, int) else None,
        steps_per_h=rates.get("steps_per_h"),
        tokens_per_s=rates.get("tokens_per_s"),
        samples_per_s=rates.get("samples_per_s"),
        left_s=_left(run, steps - step) if isinstance(steps, int) and state != "finished" else None,
        planned=planned_and_measured(run.metrics),
        evaluations=_evaluations(run),
        checkpoint=checkpoint,
        checkpoint_age_s=_age(newest, now) if newest else None,
        starts=len(run.starts),
        resumed_after=int(first["step"]) if len(run.starts) > 1 else None,
        started=str(first.get("date", "")),
        restarts=len(restarts),
        restart=str(restarts[-1].get("why", "")) if restarts else "",
        alerts=_alerts(run),
        black_box=beat.black_box if beat else "",
        again="" if state in ("running", "finished") else _again(run_dir),
    )


def _whole(run_dir: Path, checkpoint: int | None, step: int) -> bool:
    weights = next((run_dir / "hf").glob("*.safetensors"), None)
    if weights is None:
        return False
    # a run whose checkpoints were removed after the export is finished too
    last = _exported_step(weights) if checkpoint is None else checkpoint
    return last is not None and last >= step


def _exported_step(weights: Path) -> int | None:
    try:
        with safe_open(weights, framework="np") as file:  # does not import torch
            step = (file.metadata() or {}).get("step")
    except (OSError, SafetensorError):
        return None
    return None if step is None else int(step)


def _age(checkpoint: Path, now: float) -> float | None:
    try:
        return max(0.0, now - (checkpoint / RUN_STATE).stat().st_mtime)
    except OSError:  # removed since, for a newer one
        return None


def _rates(run: RunRecord) -> dict[str, float]:
    rows = [row for row in run.metrics[-RECENT:] if row.get("time/step_s", 0) > 0]
    seconds = sum(row["time/step_s"] for row in rows)
    if not rows:
        return {}
    found = {"steps_per_h": 3600 * len(rows) / seconds}
    if all("perf/tokens_per_s" in row for row in rows):
        found["tokens_per_s"] = (
            sum(row["perf/tokens_per_s"] * row["time/step_s"] for row in rows) / seconds
        )
    prompts, each = run.setting("batch.prompts"), run.setting("batch.samples_per_prompt")
    if prompts and each:
        found["samples_per_s"] = len(rows) * prompts * each / seconds
    return found


def _left(run: RunRecord, steps: int) -> float | None:
    remaining = RemainingTime(RECENT)
    for row in run.metrics[-RECENT - 1 :]:
        remaining.add(row.get("time/step_s", float("nan")))
    return remaining.left(max(0, steps))


def _evaluations(run: RunRecord) -> list[Evaluation]:
    found = []
    for task in run.tasks:
        on = [record for record in run.evals if record.get("task") == task]
        if on:
            figures = evaluation_figures(on[-1])
            step, result = int(on[-1]["step"]), result_name(on[-1])
            found.append(
                Evaluation(task or "", step, result, figures.get("pass1"), figures.get("greedy"))
            )
    return found


def _alerts(run: RunRecord) -> list[Alert]:
    """Returns the active alerts. Computes the alerts again from the stored metrics, because a run
    does not store its alerts."""
    watch = Watch(run.coarsest_dtype, sampled=not run.supervised)
    for row in run.metrics:
        metrics: dict[str, Any] = {key: value for key, value in row.items() if key != "step"}
        watch.add(int(row["step"]), metrics)
    return list(watch.active.values())


def _again(run_dir: Path) -> str:
    return shlex.join(
        ["megatron-stare", "train", str(run_dir / "config.yaml"), f"run.dir={run_dir}", "--resume"]
    )
