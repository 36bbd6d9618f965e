"""Builds Megatron's optimizer, its schedule of learning rate and weight decay, and the loss scale
for float16.

Many gradients are smaller than float16's smallest numbers. The loss is therefore multiplied by a
loss scale before backward (passes.py), and Megatron divides the float32 gradients by the same loss
scale (`prepare_grads`). After each step the loss scale is adapted, depending on whether the
gradient overflowed. Training in float32 or bfloat16 has no loss scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from megatron_stare.config.performance import megatron_fields
from megatron_stare.config.schema import OptimizerConfig, PerformanceConfig
from megatron_stare.megatron.backend.cpu_backend import backend, device

_DEFAULT = PerformanceConfig()


class LossScale(DynamicGradScaler):
    """Variant of Megatron's dynamic loss scale that is updated only when the outcome of a step is
    known. Megatron updates its own loss scale during the preparation of the gradients, when the
    outcome of the step is not yet known.

    Megatron's own class updates the scale whenever it divides a gradient by the scale, even for a
    batch without a loss. In Megatron, the optimizer of the experts updates one loss scale, and the
    optimizer of the other parameters updates a second loss scale. With separate scales, an
    optimizer could divide its gradient by a scale that differs from the scale of the loss.
    """

    def update(self, found_inf: bool) -> None:
        """Does nothing. Megatron calls `update` while it prepares gradients, before the outcome of
        the step is known."""

    def settle(self, *, overflow: bool) -> None:
        """Updates the loss scale. Call `settle` after every step that was taken, and after every
        step that was skipped because the gradient overflowed."""
        super().update(overflow)

    @property
    def exhausted(self) -> bool:
        """True if the loss scale is at its minimum. If the loss scale is at its minimum, a gradient
        overflow counts as a gradient that is not finite, because the loss scale cannot become
        smaller. Waits for the device."""
        return bool(self._scale <= self.min_scale)

    @property
    def factor(self) -> Tensor:
        """The number by which the loss is multiplied, 0-dim float32. A tensor that `factor` has
        returned keeps its value when the loss scale is updated."""
        return self._scale[0]


def install_loss_scale(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Gives all optimizers of a chain the same loss scale. Without `install_loss_scale`, each
    optimizer would have a loss scale of its own."""
    scale = LossScale(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
    for part in _chain(optimizer):
        part.grad_scaler = scale


def loss_scale_of(optimizer: MegatronOptimizer) -> LossScale | None:
    """Returns the installed loss scale, or None if the loss is not scaled."""
    return cast("LossScale | None", getattr(_chain(optimizer)[0], "grad_scaler", None))


def _chain(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def build_optimizer(
    model: list[nn.Module],
    config: OptimizerConfig,
    dtype: str,
    steps: int,
    performance: PerformanceConfig = _DEFAULT,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Builds the optimizer and its scheduler. The scheduler sets the learning rate and the weight
    decay before each of the run's `steps` optimizer steps.

    Megatron exempts norms and biases from weight decay through the factor wd_mult of their
    parameter group. Megatron's scheduler is the only code that applies wd_mult, so even a run with
    a constant learning rate needs a scheduler.
    """
    with backend():
        optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer=config.name,
                lr=config.lr,
                min_lr=config.min_lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                sgd_momentum=0.0,
                clip_grad=config.clip_grad,
                fp16=dtype == "float16",
                bf16=dtype == "bfloat16",
                use_distributed_optimizer=config.distributed,
                **megatron_fields(performance, "optimizer"),
            ),
            model,
        )
        if dtype == "float16":
            install_loss_scale(optimizer, config)
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(steps, config.warmup_steps + 1),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=steps,
            wd_incr_style="constant",
            # a resumed run may have a different number of steps: the configuration's schedule
            # applies, not the checkpoint's
            override_opt_param_scheduler=True,
            use_checkpoint_opt_param_scheduler=False,
        )
    return optimizer, scheduler


@dataclass(frozen=True)
class Outcome:
    """The outcome of an optimizer step.

    `grad_norm`: norm of the unscaled gradient before clipping.
    `finite`: false if the gradient or the loss was not finite. If the gradient overflowed only
        because the loss scale was too large, `finite` stays true, and `skipped` is true.
    `empty`: true if the batch contained no token with a loss.
    `skipped`: true if the step was skipped because the loss scale was too large and the gradient
        overflowed. Only float16 training has a loss scale. Not every overflow makes the loss scale
        smaller. Megatron numbers the overflows, and begins again with number 1 after the loss scale
        has grown. An overflow whose number in Megatron's count of overflows is below
        `optimizer.hysteresis` leaves the loss scale unchanged. Every other overflow makes the loss
        scale smaller.
    `held`: true if the gradient norm was finite but larger than the argument `norm_limit` of
        `take_step`. In this case, `take_step` does not update the parameters.
    """

    grad_norm: float
    finite: bool = True
    empty: bool = False
    skipped: bool = False
    held: bool = False

    @property
    def taken(self) -> bool:
        return self.finite and not (self.empty or self.skipped or self.held)


def take_step(
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    clip_grad: float,
    *,
    empty: Tensor | None,
    loss_not_finite: Tensor | None,
    norm_limit: float = math.inf,
) -> Outcome:
    """Clips the gradient and steps the optimizer.

    Leaves optimizer and schedule unchanged if the loss or gradient is not finite, the batch is
    empty, or the norm is above its limit. All ranks must call `take_step`. All ranks make the same
    decision whether to take the step, because the norm covers all parameters, and the flags `empty`
    and `loss_not_finite` are reduced over all ranks.

    Args:
        empty: 0-dim bool, whether no token of the batch had a loss, or None on ranks without this
            information.
        loss_not_finite: 0-dim bool, whether this rank's part of the loss is not finite, or None on
            ranks without this information.
        norm_limit: largest gradient norm before clipping at which the step is still taken.
    """
    with backend():
        # all ranks return the same overflow; without a loss scale Megatron does not check
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        scale = loss_scale_of(optimizer)
        # clipping can hide a loss that is not finite and leave a finite gradient
        lost = _on_any_rank(loss_not_finite)
        if overflow or not norm < float("inf"):  # NaN too
            # the scale is at fault only if the loss is finite and a smaller scale is possible
            if scale is None or lost or scale.exhausted:
                return Outcome(norm, finite=False)
            scale.settle(overflow=True)
            return Outcome(norm, skipped=True)
        if lost:
            return Outcome(norm, finite=False)
        # The gradient of an empty batch is 0, which all ranks see. Only then do they ask whether
        # the batch was empty.
        if norm == 0 and _on_any_rank(empty):
            return Outcome(norm, empty=True)
        if norm > norm_limit:
            return Outcome(norm, held=True)
        scheduler.step(1)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):  # experts have their own
            # the precision-aware optimizer keeps gradients outside `.grad`
            aside = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), clip_grad, norm, use_decoupled_grad=aside
            )
        optimizer.step_with_ready_grads()
        if scale is not None:
            scale.settle(overflow=False)
    return Outcome(norm)


def _on_any_rank(flag: Tensor | None) -> bool:
    """Returns True if any rank's flag is set."""
    here = (
        torch.zeros((), dtype=torch.int32, device=device())
        if flag is None
        else flag.to(torch.int32)
    )
    dist.all_reduce(here, dist.ReduceOp.MAX)
    return bool(here)
