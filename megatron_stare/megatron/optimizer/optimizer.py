"""Builds Megatron's optimizer, with its schedule of learning rate and weight decay, and the loss
scale of float16.

float16's smallest numbers are larger than many gradients. So the loss is multiplied by the scale
before backward (passes.py), Megatron divides the float32 gradients by it (`prepare_grads`), and it
moves with what came of that. In float32 and bfloat16 there is none.
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
    """Megatron's dynamic scale, except that it moves when a step is decided, not while its gradient
    is prepared.

    Megatron moves it with every gradient it prepares: for a batch without a loss too, and, where
    experts have an optimizer of their own, for each optimizer by itself, so that their gradients
    would be divided by another scale than the loss was multiplied by.
    """

    def update(self, found_inf: bool) -> None:
        """Megatron's call, which changes nothing."""

    def settle(self, *, overflow: bool) -> None:
        """Moves the scale after a step that was taken, or left out because its gradient
        overflowed."""
        super().update(overflow)

    @property
    def exhausted(self) -> bool:
        """Says whether the scale is at its floor, so that an overflow is no fault of it. Waits for
        the device."""
        return bool(self._scale <= self.min_scale)

    @property
    def factor(self) -> Tensor:
        """0-dim float32, what the loss is multiplied by. A step leaves it as it is: the next one
        has a tensor of its own."""
        return self._scale[0]


def install_loss_scale(optimizer: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Gives all optimizers of a chain one scale, in the place of Megatron's own, one each."""
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
    """The scale that was installed; None where the loss is not scaled."""
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
    """The optimizer and the scheduler that sets its rates before every one of the run's `steps`
    optimizer steps.

    Megatron applies wd_mult, which spares norms and biases, through its scheduler only, so there is
    always one.
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
            # a resumed run may have another number of steps: the configuration's schedule counts,
            # not the checkpoint's
            override_opt_param_scheduler=True,
            use_checkpoint_opt_param_scheduler=False,
        )
    return optimizer, scheduler


@dataclass(frozen=True)
class Outcome:
    """The outcome of an optimizer step.

    grad_norm: before clipping, of the gradient itself, not of the scaled one.
    finite: whether it and the loss were; true where only its scaled form was not.
    empty: no token of the batch had a loss.
    skipped: the loss scale was too large for float16, and is the next update's again, or smaller.
    held: the gradient norm was above what was allowed.
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
    """Clips and steps, unless loss or gradient is not finite, the batch is empty or the norm above
    its limit: then optimizer and schedule stay as they are. All ranks must call it, and all decide
    the same: by the norm over all parameters, and by flags that are reduced over all ranks.

    Args:
        empty: 0-dim bool, whether no token of the batch had a loss; None on ranks that do not know.
        loss_not_finite: 0-dim bool, whether this rank's part of the loss is not; None on ranks that
            do not know.
        norm_limit: a step whose gradient norm before clipping is above it is held back.
    """
    with backend():
        # all ranks return the same overflow; without a loss scale none looks
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        scale = loss_scale_of(optimizer)
        # clipping may hide a loss that is not finite, and leave a finite gradient
        lost = _on_any_rank(loss_not_finite)
        if overflow or not norm < float("inf"):  # NaN too
            # the scale is to blame only where the loss is finite and a smaller scale is left to try
            if scale is None or lost or scale.exhausted:
                return Outcome(norm, finite=False)
            scale.settle(overflow=True)
            return Outcome(norm, skipped=True)
        if lost:
            return Outcome(norm, finite=False)
        # An empty batch has a gradient of 0, which all ranks see: only then do they ask whether it
        # was empty.
        if norm == 0 and _on_any_rank(empty):
            return Outcome(norm, empty=True)
        if norm > norm_limit:
            return Outcome(norm, held=True)
        scheduler.step(1)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):  # experts have their own
            # precision-aware, gradients are not where autograd has them
            aside = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), clip_grad, norm, use_decoupled_grad=aside
            )
        optimizer.step_with_ready_grads()
        if scale is not None:
            scale.settle(overflow=False)
    return Outcome(norm)


def _on_any_rank(flag: Tensor | None) -> bool:
    """Says whether the flag is set on a rank that has one."""
    here = (
        torch.zeros((), dtype=torch.int32, device=device())
        if flag is None
        else flag.to(torch.int32)
    )
    dist.all_reduce(here, dist.ReduceOp.MAX)
    return bool(here)
