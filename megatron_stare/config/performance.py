"""Settings of `performance`, one row each. They save time or memory without changing results.

A row contains Megatron's fields, the requirements, and the check of scripts/gpu_check.sh that
proves the setting. A setting left at null is on if that check's result is committed (`proven`;
tests/test_performance.py compares it with the result) and the device meets the requirements. A new
setting needs a row here and a field in config/schema.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megatron_stare.config.schema import Config, PerformanceConfig
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape

# attention on a CPU: up to this many positions, whole float32 scores are held; from 128 positions
# on the kernel is as fast
WHOLE_UP_TO = 64

# Megatron's configuration that has a field: TransformerConfig, that of DDP, or OptimizerConfig
Part = Literal["model", "gradients", "optimizer"]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# requirements of settings: the name in messages, and a test of this device
NEEDS: dict[str, tuple[str, Callable[[], bool]]] = {
    "cuda": ("CUDA", lambda: torch.cuda.is_available()),
    "te": (
        "Transformer Engine",
        lambda: torch.cuda.is_available() and _installed("transformer_engine"),
    ),
    "wgrad": (
        "Transformer Engine, or Apex with fused_weight_gradient_mlp_cuda",
        lambda: any(map(_installed, ("transformer_engine", "fused_weight_gradient_mlp_cuda"))),
    ),
}


@dataclass(frozen=True)
class Feature:
    """A setting that is on or off.

    sets: Megatron's fields while it is on. While it is off they are false or 0.
    needs: keys of NEEDS.
    wants: settings of the run that must be on as well.
    check: the check of scripts/gpu_check.sh that proves it.
    proven: whether the check's committed result shows that it is correct and no slower.
    """

    name: str
    sets: Mapping[Part, Mapping[str, Any]]
    needs: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    check: str = "settings"
    proven: bool = field(default=False)


FEATURES: tuple[Feature, ...] = (
    Feature("rope_fusion", {"model": {"apply_rope_fusion": True}}, needs=("cuda", "te")),
    Feature("swiglu_fusion", {"model": {"bias_activation_fusion": True}}),
    Feature("bias_fusion", {"model": {"bias_dropout_fusion": True}}),
    Feature(
        "wgrad_fusion", {"model": {"gradient_accumulation_fusion": True}}, needs=("cuda", "wgrad")
    ),
    Feature("overlap_grad_reduce", {"gradients": {"overlap_grad_reduce": True}}),
    Feature(
        "overlap_param_gather",
        {"gradients": {"overlap_param_gather": True}, "optimizer": {"overlap_param_gather": True}},
        wants=("optimizer.distributed", "performance.overlap_grad_reduce"),
    ),
    Feature(
        "batched_p2p", {"model": {"batch_p2p_comm": True}}, needs=("cuda",), check="nccl_ranks"
    ),
    Feature(
        "precision_aware_optimizer",
        {"optimizer": {"use_precision_aware_optimizer": True}},
        needs=("cuda", "te"),
        wants=("optimizer.distributed",),
        check="optimizers",
    ),
    Feature(
        "optimizer_offload",
        {
            "optimizer": {
                "use_precision_aware_optimizer": True,
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": 1.0,
                "overlap_cpu_optimizer_d2h_h2d": True,
            }
        },
        needs=("cuda", "te"),
        wants=("optimizer.distributed",),
        check="optimizers",
    ),
)


# Megatron's features that are not supported, with the reason
NOT_OFFERED = {
    "tp_comm_overlap": (
        "Transformer Engine's user buffers take tensors of one size alone, tokens of a micro-batch"
        " by hidden, and micro-batches here have lengths of their own"
    ),
}


def missing(feature: Feature) -> list[str]:
    """Returns the names of the feature's requirements that this process's device does not meet."""
    return [name for name, there in (NEEDS[need] for need in feature.needs) if not there()]


def is_on(performance: PerformanceConfig, feature: Feature) -> bool:
    """Tells whether the feature is on in a run. A feature set to true counts as on, since a check
    raised before if it cannot be."""
    asked: bool | None = getattr(performance, feature.name)
    return feature.proven and not missing(feature) if asked is None else asked


def megatron_fields(performance: PerformanceConfig, part: Part) -> dict[str, Any]:
    """Returns the values, on or off, of all fields that the rows set in one of Megatron's
    configurations."""
    fields: dict[str, Any] = {}
    for feature in FEATURES:
        on = is_on(performance, feature)
        for name, value in feature.sets.get(part, {}).items():
            fields[name] = value if on else fields.get(name, type(value)())
    return fields


def environment(performance: PerformanceConfig) -> dict[str, str]:
    """Returns environment variables of trainer ranks, which CUDA and torch's allocator read at
    start."""
    named = {
        "CUDA_DEVICE_MAX_CONNECTIONS": performance.cuda_connections,
        "PYTORCH_CUDA_ALLOC_CONF": performance.cuda_allocator,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def keeps_graph(config: Config, micro_batches: int) -> bool:
    """Tells whether training reuses the forward of the log-prob pass instead of running its own.

    Requires one micro-batch per rank, whose activations are kept until backward anyway, and one
    update, so that the weights have not changed. Pipeline stages and replayed routing need a
    forward in each pass.

    Args:
        micro_batches: of a rank, in the log-prob pass.
    """
    return (
        config.performance.keep_graph
        and micro_batches == 1
        and config.batch.updates == 1
        and config.parallel.pipeline == 1
        and not config.moe.routing_replay
        and not config.skips_log_prob_pass
    )


def shares_prompts(config: Config) -> bool:
    """Tells whether a micro-batch runs a prompt through the model once for all its responses.

    Requires packed sequences that are whole on each rank, no virtual stages, which need
    micro-batches of equal shape, and no replayed routing, which has experts for each sample.
    """
    parallel = config.parallel
    return (
        config.performance.share_prompts
        and config.batch.packed
        and parallel.context == 1
        and parallel.virtual_pipeline == 1
        and not config.moe.routing_replay
    )


def check_performance(config: Config, shape: ModelShape | None = None) -> None:
    """Raises ConfigError for settings that do not go together, on any device.

    Args:
        shape: of the model; None: checks of the model are left out.
    """
    performance = config.performance
    if performance.rope_fusion and shape is not None and shape.latent is not None:
        raise ConfigError(
            f"{shape.family} has latent attention, whose rotary embedding is not fused",
            where="performance.rope_fusion",
            fix="leave it out, or set it to false",
        )
    for feature in FEATURES:
        if not getattr(performance, feature.name):
            continue
        for wanted in feature.wants:
            section, _, name = wanted.partition(".")
            if not getattr(getattr(config, section), name):
                raise ConfigError(
                    f"this setting needs {wanted}",
                    where=f"performance.{feature.name}",
                    fix=f"set {wanted}=true as well",
                )
    for name, reason in NOT_OFFERED.items():
        if getattr(performance, name):
            raise ConfigError(
                f"this setting is not offered: {reason}",
                where=f"performance.{name}",
                fix="leave it out",
            )
    if performance.optimizer_offload and config.model.dtype == "float32":
        raise ConfigError(
            "megatron-core offloads only master weights of 16-bit parameters: torch refuses"
            " float32 parameters that are cut over ranks",
            where="performance.optimizer_offload",
            fix="set model.dtype=bfloat16, or leave it out",
        )
    parallel = config.parallel
    if performance.batched_p2p and parallel.pipeline == 2 and parallel.virtual_pipeline > 1:
        raise ConfigError(
            "batched exchanges of two stages with several chunks would deliver the wrong chunk's"
            " tensors",
            where="performance.batched_p2p",
            fix="set it to false, or use more stages",
        )
    if performance.gradient_bucket is not None and not performance.overlap_grad_reduce:
        raise ConfigError(
            "a bucket size has an effect only if gradients are reduced during backward",
            where="performance.gradient_bucket",
            fix="set performance.overlap_grad_reduce=true, or leave it out",
        )
    if (
        "expandable_segments:true" in (performance.cuda_allocator or "").lower()
        and config.sglang.colocated
    ):
        raise ConfigError(
            "expandable segments cannot be shared with, or given to, servers on the same device"
            " (sglang.colocated)",
            where="performance.cuda_allocator",
            fix="leave expandable_segments out, or give the servers devices of their own",
        )


def check_device_performance(performance: PerformanceConfig) -> None:
    """Raises ConfigError if a setting is true and this process's device does not meet its
    requirements."""
    for feature in FEATURES:
        if getattr(performance, feature.name) and (lacking := missing(feature)):
            raise ConfigError(
                f"this setting needs {' and '.join(lacking)}",
                where=f"performance.{feature.name}",
                fix="set it to null",
            )
    if environment(performance) and missing(Feature("", {}, needs=("cuda",))):
        name = "cuda_connections" if performance.cuda_connections is not None else "cuda_allocator"
        raise ConfigError(
            "this setting needs CUDA", where=f"performance.{name}", fix="set it to null"
        )


def hints(performance: PerformanceConfig) -> list[str]:
    """Returns one line for --dry-run about every setting that is off, with how to turn it on or why
    it is not offered."""
    found = []
    for feature in FEATURES:
        if is_on(performance, feature):
            continue
        lacking = missing(feature)
        why = (
            f"which needs {' and '.join(lacking)}"
            if lacking
            else f"after `bash scripts/gpu_check.sh {feature.check}`"
        )
        found.append(
            f"off: performance.{feature.name}; performance.{feature.name}=true turns it on, {why}"
        )
    return found + [
        f"not offered: performance.{name}: {reason}" for name, reason in NOT_OFFERED.items()
    ]
