"""Coefficients of the time model from what a run took."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from megatron_stare.config.load import load_recorded
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.planning.coefficients import Coefficients, Fitted, changed
from megatron_stare.planning.fit import PlannedFit
from megatron_stare.planning.gpus import Gpu
from megatron_stare.planning.phase_times import (
    Lengths,
    Work,
    log_prob_work,
    rollout_seconds,
    sync_work,
    update_work,
)
from megatron_stare.resolved import resolve_run
from megatron_stare.run_state import CONFIG

WARM_UP = 2  # steps left out, in which kernels are compiled and caches filled
LEAST = 5  # steps that a median is taken of


def calibrate(run_dir: Path, gpu: Gpu, start: Coefficients, prompt: float | None) -> Fitted:
    """Medians of the run's steps, put into the model's sums and solved for its coefficients.

    Args:
        prompt: mean tokens of a prompt, which metrics do not have; None: as the run's section `plan` has it.

    Raises:
        UserError: it is no run, has too few steps, or took less than the model's least.
    """
    metrics = medians(run_dir)
    config = load_recorded(run_dir / CONFIG)
    lengths = Lengths.of(config, prompt, metrics["response/length_mean"])
    run = resolve_run(config)
    fit = PlannedFit(gpu.memory)
    nbytes = max(fit.stages(run), key=lambda each: sum(each.values()))
    works: dict[str, tuple[str, Work]] = {
        "log_prob_mfu": ("log_probs", log_prob_work(run, gpu, start, lengths)),
        "update_mfu": ("update", update_work(config, run.shape, gpu, start, lengths, nbytes)),
        "sync_bytes_s": ("sync", sync_work(config, run.shape, nbytes)),
    }
    found, spent = {}, 0.0
    for name, (phase, work) in works.items():
        seconds = metrics.get(f"time/{phase}_s", 0.0)
        spent += seconds
        if seconds and work.ideal:
            if seconds <= work.fixed:
                raise ConfigError(
                    f"{phase} took {seconds:.3g} s, and links alone would take {work.fixed:.3g} s of this GPU's node",
                    where="--calibrate",
                    fix="check --gpu",
                )
            found[name] = work.ideal / (seconds - work.fixed)
    if (seconds := metrics.get("time/rollout_s", 0.0)) and not config.rollout.staleness:
        # what bounds decoding is not seen, so both its rates are taken to be off by one factor; ahead of training, a
        # rollout's time is what training waited for
        spent += seconds
        factor = rollout_seconds(config, run.shape, gpu, start, lengths, fit.served(run)) / seconds
        found |= {name: getattr(start, name) * factor for name in ("decode_efficiency", "prefill_mfu")}
    found["fixed_s"] = max(metrics["time/step_s"] - spent, 0.0)
    return Fitted(changed(start, found), str(run_dir))


def medians(run_dir: Path) -> dict[str, float]:
    """Of each of the run's metrics, without the first steps. Raises DataError where there are too few."""
    path = run_dir / "metrics.jsonl"
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), fix="name the directory of a run") from error
    steps = [step for step in steps if "time/step_s" in step and "response/length_mean" in step][WARM_UP:]
    if len(steps) < LEAST:
        raise DataError(
            f"{len(steps)} steps after the first {WARM_UP}, and {LEAST} are needed",
            where=str(path),
            fix="calibrate with a longer run",
        )
    names = {name for step in steps for name in step if name.startswith("time/")} | {"response/length_mean"}
    return {name: statistics.median([step[name] for step in steps if name in step]) for name in names}
