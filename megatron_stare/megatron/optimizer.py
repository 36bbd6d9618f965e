"""Megatron's optimizer with its learning-rate and weight-decay schedule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor, nn

from megatron_stare.config.schema import OptimizerConfig, PerformanceConfig
from megatron_stare.megatron.cpu_backend import backend, device
from megatron_stare.performance import megatron_fields

_DEFAULT = PerformanceConfig()


def build_optimizer(
    model: list[nn.Module],
    config: OptimizerConfig,
    dtype: str,
    steps: int,
    performance: PerformanceConfig = _DEFAULT,
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer and the scheduler that sets its rates before every one of the run's `steps` optimizer steps.

    Megatron applies wd_mult, which spares norms and biases, through its scheduler only, so there is always one.
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
                bf16=dtype == "bfloat16",
                use_distributed_optimizer=config.distributed,
                **megatron_fields(performance, "optimizer"),
            ),
            model,
        )
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
            # a resumed run may have another number of steps: the configuration's schedule counts, not the checkpoint's
            override_opt_param_scheduler=True,
            use_checkpoint_opt_param_scheduler=False,
        )
    return optimizer, scheduler


@dataclass(frozen=True)
class Outcome:
    """What became of an optimizer step.

    grad_norm: before clipping.
    finite: whether it was.
    empty: no token of the batch had a loss.
    """

    grad_norm: float
    finite: bool = True
    empty: bool = False

    @property
    def taken(self) -> bool:
        return self.finite and not self.empty


def take_step(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, clip_grad: float, empty: Tensor | None
) -> Outcome:
    """Clips and steps, unless the gradient is not finite or the batch is empty: then optimizer and schedule stay as
    they are. All ranks must call it.

    Args:
        empty: 0-dim bool, whether no token of the batch had a loss; None on ranks that do not know.
    """
    with backend():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())  # the one value a step reads from the device
        if not norm < float("inf"):  # NaN too
            return Outcome(norm, finite=False)
        # an empty batch has a gradient of 0, which all ranks see: only then need they ask those that know
        if norm == 0 and _on_any_rank(empty):
            return Outcome(norm, empty=True)
        scheduler.step(1)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):  # experts have their own
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, norm)
        optimizer.step_with_ready_grads()
    return Outcome(norm)


def _on_any_rank(flag: Tensor | None) -> bool:
    """Whether the flag is set on a rank that has one."""
    here = torch.zeros((), dtype=torch.int32, device=device()) if flag is None else flag.to(torch.int32)
    dist.all_reduce(here, dist.ReduceOp.MAX)
    return bool(here)
