"""What runs on a CPU or on CUDA only, said where the device is known: before a process is started, or by the rank."""

from __future__ import annotations

import importlib.util

import torch

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError


def check_device(config: Config, *, experts: bool) -> None:
    """Raises ConfigError for what the device that this process sees cannot train, or not rightly yet.

    Args:
        experts: whether the model is a mixture of experts.
    """
    if torch.cuda.is_available():
        _check_cuda(config, experts)


def _check_cuda(config: Config, experts: bool) -> None:
    if experts and not importlib.util.find_spec("transformer_engine"):
        raise ConfigError(
            "on CUDA mixture-of-experts models need Transformer Engine: megatron-core's router calls a function of it",
            where="model.path",
            fix="install Transformer Engine, use a dense model, or train on CPUs",
        )
    if config.parallel.context > 1 and not importlib.util.find_spec("transformer_engine"):
        raise ConfigError(
            "on CUDA context parallelism needs Transformer Engine's attention",
            where="parallel.context",
            fix="set it to 1, or install Transformer Engine",
        )
