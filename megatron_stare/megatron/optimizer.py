"""Megatron's optimizer with its learning-rate and weight-decay schedule."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_stare.config.schema import OptimizerConfig
from megatron_stare.megatron.cpu_backend import backend


def build_optimizer(
    model: list[nn.Module], config: OptimizerConfig, dtype: str, steps: int
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
        )
    return optimizer, scheduler


def take_step(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, clip_grad: float) -> tuple[float, bool]:
    """Clips and steps. Returns the gradient norm before clipping, and whether it was finite; if not, no step."""
    with backend():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())  # the one value a step reads from the device
        finite = norm < float("inf")  # False for NaN too
        if not finite:
            return norm, False
        scheduler.step(1)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):  # experts have their own
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip_grad, norm)
        optimizer.step_with_ready_grads()
    return norm, True
