"""Predicts the times and the memory of a run before the run starts any process. The prediction uses
the same computation as the command `megatron-stare plan`. The prediction is logged with every step,
next to the measured times and memory.

`driver/held_run.py` makes the prediction once, before any process starts. The prediction is logged
as the metrics `plan/*`. If the prediction is not possible, a note gives the reason, and the run
continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.errors import UserError
from megatron_stare.observability.metrics.planned import MEMORY, PHASES
from megatron_stare.planning.forecast import capacity_of, gpu_of, step_of
from megatron_stare.planning.gpus import CPU, Coefficients, read_coefficients
from megatron_stare.planning.memory import Budget, PlannedFit
from megatron_stare.planning.phase_times import (
    Lengths,
    Step,
    all_gpus,
    forward_flops,
    forwards,
)
from megatron_stare.records.metric import Metric
from megatron_stare.records.rollout_batch import RolloutBatch

# the coefficient of each phase that every calibration fits
RATES = {
    "rollout": "decode_efficiency",
    "log_probs": "log_prob_mfu",
    "update": "update_mfu",
    "sync": "sync_bytes_s",
}
# memory items that are not tensors of a trainer rank
_OTHERS = ("served", "cache", "processes")
METRICS = (
    Metric(
        "plan/response_tokens",
        "tokens",
        "mean length of responses for which the plan is made",
        "near response/length_mean; if not, set plan.response_tokens, or the planned seconds are"
        " for other work",
    ),
    *(
        Metric(
            f"plan/{phase}_s",
            "seconds",
            f"seconds that `megatron-stare plan` predicts for time/{phase}_s",
            "within a factor of 1.5; logged only if `plan --calibrate` has fitted the phase, or for"
            " the whole step all phases",
        )
        for phase in PHASES
    ),
    *(
        Metric(
            f"plan/{phase}_mb",
            "MB",
            f"10^6 bytes: tensors of the fullest rank that `megatron-stare plan` predicts for the"
            f" phase {phase}, with full micro-batches",
            f"1 to 2 times memory/{phase}_live_mb, on GPUs memory/{phase}_peak_mb; more if batches"
            " do not fill a micro-batch; performance.keep_graph keeps more in log_probs",
        )
        for phase in MEMORY
    ),
    Metric(
        "perf/train_tflops",
        "TFLOP/s",
        "10^12 operations of the model, without recomputation, that a rank of the trainer did a"
        " second of time/log_probs_s and time/update_s, forward as 1 and backward as 2 of the"
        " forward's operations",
        "steady; above a third of the peak on GPUs",
    ),
    Metric(
        "perf/train_mfu",
        "share",
        "perf/train_tflops over the peak of the GPU in 16 bits (model FLOPs utilisation)",
        "0.3 to 0.5; only on GPUs that `megatron-stare plan` knows",
    ),
    Metric(
        "perf/mfu",
        "share",
        "the same operations over time/step_s and all GPUs, those of the servers too",
        "as `megatron-stare plan` predicts; only on GPUs that it knows",
    ),
)


class ModelFlops:
    """Computes the trainer's FLOP/s and MFU in a step from the lengths of the step's sequences."""

    def __init__(self, run: ResolvedRun) -> None:
        self._shape, self._config = run.shape, run.config
        self._passes = forwards(run) + 3 * run.config.batch.epochs
        self._peak: float | None = None
        with contextlib.suppress(UserError):  # the peak of an unknown GPU is unknown
            gpu = gpu_of(run.config)
            self._peak = None if gpu is CPU else gpu.flops

    def metrics(self, batch: RolloutBatch, measured: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics `perf/train_tflops`, `perf/train_mfu` and `perf/mfu` of a step.
        Without measured times of the log-prob pass and the update, returns no metrics. For an
        unknown GPU, returns only `perf/train_tflops`.

        Args:
            measured: the step's other metrics.
        """
        branches = batch.branches
        flops = self._passes * sum(
            forward_flops(self._shape, context, response)
            for context, response in zip(
                branches.contexts.tolist(), branches.responses.tolist(), strict=True
            )
        )
        ranks = self._config.parallel.world_size
        seconds = measured.get("time/log_probs_s", 0.0) + measured.get("time/update_s", 0.0)
        if not seconds:
            return {}
        found = {"perf/train_tflops": flops / seconds / ranks / 1e12}
        if self._peak is not None:
            found["perf/train_mfu"] = flops / (seconds * ranks * self._peak)
            whole = measured["time/step_s"] * all_gpus(self._config) * self._peak
            found["perf/mfu"] = flops / whole
        return found


@dataclass(frozen=True)
class OwnPlan:
    """The prediction of a run.

    `metrics`: predicted values; empty if there is no prediction.
    `notes`: reasons for a missing prediction, one line each.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def own_plan(run: ResolvedRun) -> OwnPlan:
    """Predicts the times and memory of a run that passed its checks. Must be called before any
    process group exists, because `own_plan` creates a fake process group to build a layer of the
    model on the meta device."""
    if not run.config.plan.enabled:
        return OwnPlan()
    try:
        return OwnPlan(predicted(run))
    except Exception as error:  # a run that cannot be predicted can still be trained
        why = error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        fix = f" ({error.fix})" if isinstance(error, UserError) and error.fix else ""
        return OwnPlan(notes=(f"plan: memory and time of this run are not predicted: {why}{fix}",))


def predicted(run: ResolvedRun) -> dict[str, float]:
    """Returns the metrics `plan/*`. Raises UserError if the kind of GPU is unknown or the
    coefficients cannot be read."""
    config = run.config
    gpu, lengths = gpu_of(config), Lengths.of(config)
    fit = PlannedFit(capacity_of(config, gpu))
    fitted = read_coefficients(Path(config.plan.coefficients), gpu.name)
    step = step_of(run, gpu, fitted.coefficients, lengths, fit)
    budgets = fit.budgets(run)
    seconds = {**step.phases, "step": step.seconds}
    known = _calibrated(step, fitted.coefficients)
    found = {"plan/response_tokens": lengths.response}
    found |= {f"plan/{phase}_s": seconds[phase] for phase in PHASES if phase in known}
    return found | {
        f"plan/{phase}_mb": max(_tensors(each, phase) for each in budgets) / 1e6 for phase in MEMORY
    }


def _calibrated(step: Step, of: Coefficients) -> set[str]:
    """Returns the names of the phases whose rates a calibration has fitted (see RATES). The name
    "step" stands for the whole step. This name is also returned if a calibration has fitted two
    things: `fixed_s`, and the rate of every phase with a predicted time above 0. Rates that are
    only assumed can be wrong by a factor of a hundred, especially on CPUs."""
    fitted = {each.name for each in fields(of) if getattr(of, each.name) != each.default}
    found = {phase for phase, rate in RATES.items() if rate in fitted}
    needed = {phase for phase, seconds in step.phases.items() if seconds}
    return found | ({"step"} if needed <= found and "fixed_s" in fitted else set())


def _tensors(budget: Budget, phase: str) -> int:
    return sum(nbytes for item, nbytes in budget.phases[phase].items() if item not in _OTHERS)
