"""Settings of `performance`, one row each: training gets faster or smaller, and what is computed
stays the same.

A row names Megatron's fields, what the setting needs, and the check of scripts/gpu_check.sh that
proves it. A setting left at null is on once that check's result is committed (`proven`;
tests/test_performance.py holds it against the result) and the device has what it needs. To add one:
a row here and a field in config/schema.py.
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

# attention on a CPU: up to so many positions float32 scores are held whole; from 128 on the kernel
# is as quick
WHOLE_UP_TO = 64

# which of Megatron's configurations a setting is in: TransformerConfig, its DDP's, OptimizerConfig
Part = Literal["model", "gradients", "optimizer"]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


# what a setting may need: how it is called, and whether this device has it
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

    sets: Megatron's fields while it is on; off, they are false or 0.
    needs: of NEEDS.
    wants: settings of the run that must be on as well.
    check: what of scripts/gpu_check.sh proves it.
    proven: whether the check's result, committed, says that it is right and no slower.
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


# what Megatron has and a run here cannot have, with the reason
NOT_OFFERED = {
    "tp_comm_overlap": (
        "Transformer Engine's user buffers take tensors of one size alone, tokens of a micro-batch"
        " by hidden, and micro-batches here have lengths of their own"
    ),
}


def missing(feature: Feature) -> list[str]:
    """Names of what the feature needs and the device that this process sees does not have."""
    return [name for name, there in (NEEDS[need] for need in feature.needs) if not there()]


def is_on(performance: PerformanceConfig, feature: Feature) -> bool:
    """Tells whether the feature is on in a run; one that was asked for is on, or was refused
    before."""
    asked: bool | None = getattr(performance, feature.name)
    return feature.proven and not missing(feature) if asked is None else asked


def megatron_fields(performance: PerformanceConfig, part: Part) -> dict[str, Any]:
    """Every field of one of Megatron's configurations that a row sets, on or off."""
    fields: dict[str, Any] = {}
    for feature in FEATURES:
        on = is_on(performance, feature)
        for name, value in feature.sets.get(part, {}).items():
            fields[name] = value if on else fields.get(name, type(value)())
    return fields


def environment(performance: PerformanceConfig) -> dict[str, str]:
    """Environment variables of trainer ranks, which CUDA and torch's allocator read as they
    start."""
    named = {
        "CUDA_DEVICE_MAX_CONNECTIONS": performance.cuda_connections,
        "PYTORCH_CUDA_ALLOC_CONF": performance.cuda_allocator,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def keeps_graph(config: Config, micro_batches: int) -> bool:
    """Tells whether the training pass goes on from the log-prob pass instead of making a forward of
    its own.

    Takes one micro-batch a rank, whose activations live until its backward anyway, and one update,
    so that the weights are those of the pass. Stages of a pipeline hand activations on, and
    replayed routing is given to one pass at a time: with either each pass makes its own forward.

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
    """Tells whether a prompt goes through the model once for all its responses of a micro-batch.

    The responses must lie end to end, whole, and no pass may need all micro-batches of one shape or
    experts of each sample's own.
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
    """Raises ConfigError for a setting that was asked for and needs what the device that this
    process sees lacks."""
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
    """The settings that are off, a line each with what turns it on or why nothing does, for
    --dry-run."""
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
