"""A training step on the real trainer, as the driver takes it."""

from __future__ import annotations

from typing import Any

import torch
from support.glossary import explained
from torch import Tensor

from megatron_stare.cluster.trainer_group import plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.optimizer.optimizer import loss_scale_of
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops.plan import plan_mini_batches
from megatron_stare.records.batch import MicroBatchPlan
from megatron_stare.records.rollout_batch import RolloutBatch


def plan_of(config: Config, batch: RolloutBatch) -> MicroBatchPlan:
    """The plan that the driver would make."""
    return plan_mini_batches(
        batch.lengths.tolist(), batch.branch_groups.tolist(), plan_rules(resolve_run(config))
    )


def log_prob_pass(
    trainer: Trainer, batch: RolloutBatch, plan: MicroBatchPlan | None = None
) -> None:
    """The log-prob pass over this rank's share of the batch."""
    plan = plan_of(trainer.config, batch) if plan is None else plan
    trainer.compute_log_probs(batch.share(plan.branches_of(trainer.data_rank())), plan)


def take_step(
    trainer: Trainer, batch: RolloutBatch, state: dict[str, float] | None = None
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """All updates of a batch: what each of them reported here, and the method's state after them.

    Args:
        state: of the method before the step; None: as a run begins.
    """
    log_prob_pass(trainer, batch)
    trainer.measure(trainer.method.initial_state() if state is None else state)
    results = [trainer.update(number) for number in range(trainer.config.batch.updates)]
    reported = [result for result in results if result is not None]
    for metrics, _ in reported:
        explained(metrics)
    return [metrics for metrics, _ in reported], reported[-1][1] if reported else {}


def state_of(trainer: Trainer) -> list[Any]:
    """Everything a step could move on this rank but the loss scale: weights, moments, step counts,
    rates, the schedule."""
    policy, parts = trainer.policy, []
    for part in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        for group in part.optimizer.param_groups:
            parts += [group["lr"], group["weight_decay"]]
            for parameter in group["params"]:
                parts += [parameter.detach().clone()]
                parts += [x.clone() for _, x in sorted(part.optimizer.state[parameter].items())]
    parts += [
        parameter.detach().clone() for chunk in policy.model for parameter in chunk.parameters()
    ]
    return [*parts, policy.scheduler.state_dict()]


def loss_scale_state(trainer: Trainer) -> list[Any]:
    """The scale, the steps since it last moved, and the overflows it lets pass; [] where there is
    none."""
    scale = loss_scale_of(trainer.policy.optimizer)
    return [] if scale is None else list(scale.state_dict().values())


def equal(one: list[Any], other: list[Any]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )
