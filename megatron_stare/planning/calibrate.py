"""Fits the coefficients of the time model to the measured times of runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_stare.config.load import load_recorded
from megatron_stare.config.resolved import resolve_run
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.planning.gpus import Coefficients, Fitted, Gpu, changed
from megatron_stare.planning.memory import PlannedFit
from megatron_stare.planning.phase_times import (
    Lengths,
    log_prob_work,
    rollout_seconds,
    sync_work,
    update_work,
)
from megatron_stare.run_dir.run_state import CONFIG

APART = 1.25  # least ratio between two runs' other/ideal that lets both terms be fitted
WARM_UP = 2  # first steps to skip, in which kernels are compiled and caches filled
LEAST = 5  # fewest steps for a median


@dataclass(frozen=True)
class Seen:
    """Measured time of one phase in one run, and the inputs of the time model for this phase.

    `ideal`: value that the time model multiplies by the coefficient `inverse`. The unit of `ideal`
        is seconds, or bytes for the weight sync. For the rollout, `ideal` is the predicted time
        with `decode_layer_s` = 0. For every other phase, `ideal` is `Work.ideal`.
    `other`: the value that is multiplied, in the time model, by the coefficient named `times`. The
        unit of `other` is seconds. For the rollout, `other` is the increase in the predicted time
        if `decode_layer_s` is raised from 0 to 1 second. For each of the remaining phases, the
        field `other` is `Work.moved`.
    `seconds`: measured seconds of the phase, minus `Work.fixed`. `Work.fixed` is the predicted time
        of communication and offloading. The calibration does not change `Work.fixed`. For the
        rollout phase, `seconds` is the measured time, and `Work.fixed` is not subtracted. The value
        of `seconds` is above 0.
    """

    ideal: float
    other: float
    seconds: float


def solve(runs: Sequence[Seen], least: float) -> tuple[float, float]:
    """Fits the two coefficients `inverse` and `times` of the time model to the measured seconds of
    the runs. The time model adds two products: the coefficient `inverse` multiplied by a run's
    `ideal`, and the coefficient `times` multiplied by the run's `other`. Returns the pair
    (`inverse`, `times`) that minimises the sum of the squared relative errors of the predicted
    seconds.

    Both coefficients are at least 0. The fit can separate the two coefficients only if the ratio
    `other` / `ideal` differs enough between the runs: the largest ratio must be at least `APART`
    times the smallest ratio. If the largest ratio `other` / `ideal` is below `APART` times the
    smallest such ratio, or if there is only one run, the coefficient `times` is 0. If the
    coefficient `inverse` is below the argument `least`, the runs were faster than the GPU's peak
    rate. The coefficient `inverse` can be below `least` only if the coefficient `times` is 0.
    """
    ideal, other = np.array([(run.ideal / run.seconds, run.other / run.seconds) for run in runs]).T
    ones = np.ones(len(runs))
    alone = _one(ideal, ones)
    ratios = [run.other / run.ideal for run in runs]
    if alone <= least or max(ratios) < APART * min(ratios) or not max(ratios):
        return alone, 0.0
    inverse, times = np.linalg.lstsq(np.column_stack((ideal, other)), ones, rcond=None)[0]
    if times < 0:
        return alone, 0.0
    if inverse < least:
        return least, max(_one(other, ones - least * ideal), 0.0)
    return float(inverse), float(times)


def _one(column: np.ndarray, target: np.ndarray) -> float:
    return float(column @ target / (column @ column))


def calibrate(
    run_dirs: Sequence[Path], gpu: Gpu, start: Coefficients, prompt: float | None
) -> Fitted:
    """Fits the time model's coefficients to the median times of the runs' phases. One run suffices
    to fit the rate of every phase. If the runs differ in model width or batch size, `calibrate`
    also fits the time that a phase spends outside its matrix products.

    Args:
        prompt: mean number of tokens of a prompt. The metrics do not contain this number. None: the
            `plan.prompt_tokens` of each run.

    Raises:
        UserError: a directory contains no run, a run has too few steps, or a run was faster than
            the time model allows.
    """
    seen: dict[str, list[Seen]] = {
        phase: [] for phase in ("log_probs", "update", "sync", "rollout")
    }
    beside = []
    for run_dir in run_dirs:
        metrics = medians(run_dir)
        spent = 0.0
        parts = _parts(run_dir, metrics, gpu, start, prompt)
        for phase, part in parts.items():
            seen[phase].append(part)
            spent += metrics[f"time/{phase}_s"]
        if "rollout" not in parts:  # the wait for rollouts is no fixed time
            spent += metrics.get("time/rollout_s", 0.0)
        beside.append(max(metrics["time/step_s"] - spent, 0.0))
    found = {"fixed_s": statistics.median(beside)}
    for phase, share, moves in (
        ("log_probs", "log_prob_mfu", "log_prob_moves"),
        ("update", "update_mfu", "update_moves"),
    ):
        if seen[phase]:
            inverse, found[moves] = solve(seen[phase], 1.0)
            found[share] = 1 / inverse
    if seen["sync"]:
        found["sync_bytes_s"] = 1 / solve(seen["sync"], 0.0)[0]
    if seen["rollout"]:
        # metrics do not show what bounds decoding, so both rates get the same factor
        rates = {name: getattr(start, name) for name in ("decode_efficiency", "prefill_mfu")}
        inverse, found["decode_layer_s"] = solve(seen["rollout"], max(rates.values()))
        found |= {name: rate / inverse for name, rate in rates.items()}
    return Fitted(changed(start, found), ", ".join(str(run_dir) for run_dir in run_dirs))


def _parts(
    run_dir: Path, metrics: dict[str, float], gpu: Gpu, start: Coefficients, prompt: float | None
) -> dict[str, Seen]:
    """Returns a dict that maps the name of each phase to an object of the class `Seen`. Phases
    without a measured time or without predicted work are left out. If `rollout.staleness` is above
    0, the dict does not contain the rollout phase. Raises ConfigError if a phase took less time
    than its communication alone would need."""
    config = load_recorded(run_dir / CONFIG)
    lengths = Lengths.of(config, prompt, metrics["response/length_mean"])
    run = resolve_run(config)
    fit = PlannedFit(gpu.memory)
    nbytes = max(fit.stages(run), key=lambda each: sum(each.values()))
    works = {
        "log_probs": log_prob_work(run, gpu, start, lengths, nbytes),
        "update": update_work(run, gpu, start, lengths, nbytes),
        "sync": sync_work(run, nbytes),
    }
    found = {}
    for phase, work in works.items():
        seconds = metrics.get(f"time/{phase}_s", 0.0)
        if not (seconds and work.ideal):
            continue
        if seconds <= work.fixed:
            raise ConfigError(
                f"{phase} took {seconds:.3g} s, but the links of this GPU's node alone would need"
                f" {work.fixed:.3g} s",
                where=f"--calibrate {run_dir}",
                fix="check --gpu",
            )
        found[phase] = Seen(work.ideal, work.moved, seconds - work.fixed)
    seconds = metrics.get("time/rollout_s", 0.0)
    # with staleness, rollouts run ahead and the logged time is only training's wait for them
    if seconds and not config.rollout.staleness:
        served = fit.served(run)
        at_rates, with_one = (
            rollout_seconds(
                config, run.shape, gpu, replace(start, decode_layer_s=each), lengths, served
            )
            for each in (0.0, 1.0)
        )
        found["rollout"] = Seen(at_rates, with_one - at_rates, seconds)
    return found


def medians(run_dir: Path) -> dict[str, float]:
    """Returns the medians of a run's time and length metrics over all steps but the first
    `WARM_UP`. Raises DataError if fewer than `LEAST` steps follow the first `WARM_UP` steps."""
    path = run_dir / "metrics.jsonl"
    try:
        steps = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot be read: {error}", where=str(path), fix="name the directory of a run"
        ) from error
    steps = [step for step in steps if "time/step_s" in step and "response/length_mean" in step][
        WARM_UP:
    ]
    if len(steps) < LEAST:
        raise DataError(
            f"{len(steps)} steps after the first {WARM_UP}, but {LEAST} are needed",
            where=str(path),
            fix="calibrate with a longer run",
        )
    names = {name for step in steps for name in step if name.startswith("time/")} | {
        "response/length_mean"
    }
    return {
        name: statistics.median([step[name] for step in steps if name in step]) for name in names
    }
