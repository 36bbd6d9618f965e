"""What runs on a CPU or on CUDA only, said where the device is known: before a process is started, or by the rank."""

from __future__ import annotations

import importlib.util

import torch

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError

# whose Adam keeps one step count for all parameters, as Megatron's checkpoints of a DistributedOptimizer expect
FUSED_ADAMS = ("transformer_engine", "apex")


def check_device(config: Config, *, experts: bool) -> None:
    """Raises ConfigError for what the device that this process sees cannot train, or not rightly yet.

    Args:
        experts: whether the model is a mixture of experts.
    """
    if torch.cuda.is_available():
        _check_cuda(config, experts)
    else:
        _check_cpu(config)


def _check_cuda(config: Config, experts: bool) -> None:
    if experts:
        raise ConfigError(
            "mixture-of-experts models do not run on CUDA yet: their layers cannot be built there, with Transformer "
            "Engine or without",
            where="model.path",
            fix="use a dense model, or train on CPUs",
        )
    if config.optimizer.distributed and not any(importlib.util.find_spec(name) for name in FUSED_ADAMS):
        raise ConfigError(
            "on CUDA without Transformer Engine or Apex Megatron's DistributedOptimizer resumes with wrong step counts",
            where="optimizer.distributed",
            fix="set it to false, or install Transformer Engine",
        )


def _check_cpu(config: Config) -> None:
    if config.model.dtype == "bfloat16":
        raise ConfigError("bfloat16 training needs CUDA", where="model.dtype", fix="use float32 on a CPU")
