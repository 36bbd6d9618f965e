"""Checks the time limits of a run before the run starts any process. Each time limit is compared
with the time that `megatron-stare plan` predicts.

A limit below the predicted time is an error, because a run of the planned size would time out. The
error contains the limit and the predicted time. If the kind of GPU is unknown, the limits are not
checked, because no time can be predicted. If the run uses no GPU, the limits are not
checked, because the nominal rates of a CPU give no reliable prediction. The setting `plan.gpu`
names the kind of GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.config.engines_alone import evaluation_engines
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.planning.forecast import capacity_of, gpu_of, step_of
from megatron_stare.planning.gpus import CPU, Coefficients, Gpu, read_coefficients
from megatron_stare.planning.memory import PlannedFit
from megatron_stare.planning.phase_times import Lengths, RequestTime, request_time
from megatron_stare.rollout.engines.replicas import ServedMemory, replica_count, replica_gpus
from megatron_stare.tasks.task import evaluation_tasks


@dataclass(frozen=True)
class Held:
    """A time limit for some work, and the planned time of this work, both in seconds.

    `where`: name of the setting that contains the limit.
    `what`: name of the work whose time is limited.
    """

    where: str
    limit_s: float
    what: str
    planned_s: float

    def require(self) -> None:
        """Raises ConfigError if the limit is shorter than the planned time."""
        if self.limit_s < self.planned_s:
            raise ConfigError(
                f"{self.what} takes {self.planned_s:,.0f} s by the plan, and {self.where} allows"
                f" {self.limit_s:,.0f}",
                where=self.where,
                fix=(
                    f"at least {math.ceil(self.planned_s):,}, better twice as much; or correct the"
                    " plan: plan.response_tokens, plan.gpu, `megatron-stare plan --calibrate`"
                ),
            )


def check_limits(run: ResolvedRun) -> None:
    """Compares the time limit of each kind of work, such as a weight sync, with the planned time of
    this work. Raises ConfigError if a time limit is shorter than the planned time. If several time
    limits are too short, the error names only the first of these limits."""
    try:
        found = list(held(run))
    # A run that cannot be planned can still be trained. own_plan.py reports the reason.
    except Exception:
        return
    for each in found:
        each.require()


def limits_not_checked(config: Config) -> list[str]:
    """Returns a list with one line of text if the time limits could not be compared with the plan
    because the kind of GPU is unknown. Otherwise returns []."""
    if (
        config.plan.enabled
        and replica_count(config)
        and replica_gpus(config)
        and _gpu(config) is None
    ):
        return [
            "not checked: limits against the plan, as the kind of GPU is not known here (plan.gpu)"
        ]
    return []


def held(run: ResolvedRun) -> Iterator[Held]:
    """Yields one object of the class `Held` for each kind of work that a time limit restricts. The
    object contains the time limit, and the planned duration of the work that must end within the
    time limit. Several kinds of work can have the same time limit. Yields nothing if plans are
    disabled or the kind of GPU is unknown."""
    config = run.config
    gpu = _gpu(config) if config.plan.enabled else None
    if gpu is None:
        return
    of = read_coefficients(Path(config.plan.coefficients), gpu.name).coefficients
    lengths = Lengths.of(config)
    fit = PlannedFit(capacity_of(config, gpu))
    step = step_of(run, gpu, of, lengths, fit)
    requests = config.faults.requests
    call_s = config.runtime.timeout_s
    request = None
    if replica_count(config):
        request = request_time(config, run.shape, gpu, of, lengths, fit.served(run))
        yield Held(
            "faults.requests.request_s",
            requests.request_limit(call_s),
            f"a {'response' if config.partial.tokens is None else 'round'} of"
            f" {request.tokens:,.0f} tokens beside {request.beside:,.0f} others at its server",
            request.longest_s,
        )
        for name, longest in _of_evaluations(run, gpu, of, fit.served(run)):
            yield Held(
                "faults.requests.request_s",
                requests.request_limit(call_s),
                f"a response of {longest.tokens:,.0f} tokens of {name} beside"
                f" {longest.beside:,.0f} others at its server",
                longest.longest_s,
            )
    if requests.rollout_s is not None:
        yield Held(
            "faults.requests.rollout_s", requests.rollout_s, "a rollout", step.phases["rollout"]
        )
    calls = {
        "the log-prob pass": step.phases["log_probs"],
        "an update of a mini-batch": step.phases["update"] / config.batch.updates,
        "a weight sync": step.phases["sync"],
        "a checkpoint": step.checkpoint,
    }
    for what, seconds in calls.items():
        yield Held("runtime.timeout_s", call_s, what, seconds)
    if (
        request is not None and config.faults.hangs.enabled
    ):  # these must show progress within first_s
        first_s = config.faults.hangs.first_s
        yield Held(
            "faults.hangs.first_s", first_s, "the first response of a rollout", request.first_s
        )
        yield Held("faults.hangs.first_s", first_s, "a weight sync", step.phases["sync"])


def _of_evaluations(
    run: ResolvedRun, gpu: Gpu, of: Coefficients, served: ServedMemory | None
) -> Iterator[tuple[str, RequestTime]]:
    """Yields the name of each evaluation task that runs on the training engines, and the planned
    durations of the task's requests. An evaluation never cuts a response, even with partial
    rollouts."""
    if evaluation_engines(run.config) is not None:
        return
    for task in evaluation_tasks(run.config):
        config = task.config
        # 0: all problems of a file, whose number is not known here: enough to fill every server
        prompts = config.eval.prompts or config.rollout.max_batch * replica_count(config)
        asked = {"prompts": prompts, "samples_per_prompt": task.samples, "generate_prompts": None}
        config = config.model_copy(
            update={
                "batch": config.batch.model_copy(update=asked),
                "partial": config.partial.model_copy(update={"tokens": None}),
            }
        )
        name = "the evaluation" if task.name is None else f"task {task.name}"
        yield name, request_time(config, run.shape, gpu, of, Lengths.of(config), served)


def _gpu(config: Config) -> Gpu | None:
    try:
        gpu = gpu_of(config)
    except ConfigError:
        return None
    return None if gpu is CPU else gpu
