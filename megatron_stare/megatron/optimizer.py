"""Megatron's optimizer with its learning-rate and weight-decay schedule."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from megatron_stare.config.schema import OptimizerConfig
from megatron_stare.megatron.cpu_backend import backend


def build_optimizer(
    model: list[nn.Module], config: OptimizerConfig, dtype: str, steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer and the scheduler that sets its rates before every step.

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
