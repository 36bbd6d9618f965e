"""Lists the settings of the section `performance`, one row per setting. The settings of
`performance` save time or memory, and change results only in the last bits.

Each row of FEATURES contains the setting's requirements, its tests, its check in
scripts/gpu_check.sh, and the values that Megatron's fields get while the setting is on. If a
setting is null, `chosen` decides whether the setting is on. On a GPU, null turns a setting on if
three conditions are met: the setting is tested, the device meets the setting's requirements, and
the run meets the setting's requirements. A setting counts as tested if the setting's row in
FEATURES has a text in the field `covered`, or the value true in the field `proven`. The field
`proven` may be true only if a result file in benchmarks/results/gpu shows that the setting passed
its check; tests/test_performance.py tests this condition. With `performance.automatic: false`, all
settings with the value null are off. A new setting needs a row in FEATURES and a field in
config/training_sections.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
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
    # for Transformer Engine's layers too: Megatron's output layer refuses the setting without it
    "wgrad": (
        "Apex with fused_weight_gradient_mlp_cuda",
        lambda: _installed("fused_weight_gradient_mlp_cuda"),
    ),
}


@dataclass(frozen=True)
class Feature:
    """A setting that can be on or off.

    `sets`: the values that Megatron's fields get while the setting is on. While the setting is off,
        the fields that are named in `sets` are false or 0.
    `needs`: requirements that the device must meet, as keys of the dict NEEDS.
    `wants`: other settings of the run that must be on before this setting can be on.
    `covered`: text that names the tests of the setting in this repository or in an upstream
        library. `covered` is "" if the setting has no tests. `covered` is also "" if the setting is
        a trade-off, such as less memory for more time.
    `check`: name of the check in scripts/gpu_check.sh that tests the setting.
    `proven`: true if the setting was correct and not slower in its check on a GPU, according to the
        result file of the check in benchmarks/results/gpu. The check named `optimizers` is an
        exception: in this check, the setting must be correct and save memory.
    """

    name: str
    sets: Mapping[Part, Mapping[str, Any]]
    needs: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    covered: str = ""
    check: str = "settings"
    proven: bool = field(default=False)


# Upstream's tests at core_v0.19.0 of Megatron-LM and 2.20 of Transformer Engine.
FEATURES: tuple[Feature, ...] = (
    Feature(
        "rope_fusion",
        {"model": {"apply_rope_fusion": True}},
        needs=("cuda", "te"),
        covered="Transformer Engine's tests/pytorch/test_fused_rope.py:135, packed sequences",
    ),
    Feature(
        "swiglu_fusion",
        {"model": {"bias_activation_fusion": True}},
        covered=(
            "tests/megatron/test_overlap.py::test_fused_operations_compute_the_same; for experts"
            " Megatron's tests/unit_tests/fusions/test_swiglu_fusion.py:8"
        ),
    ),
    Feature(
        "bias_fusion",
        {"model": {"bias_dropout_fusion": True}},
        covered=(
            "tests/megatron/test_overlap.py::test_fused_operations_compute_the_same; Megatron's"
            " tests/unit_tests/fusions/test_bias_dropout_fusion.py:15"
        ),
    ),
    Feature(
        "wgrad_fusion",
        {"model": {"gradient_accumulation_fusion": True}},
        needs=("cuda", "wgrad"),
        covered="Transformer Engine's tests/pytorch/test_numerics.py:1443",
    ),
    Feature(
        "overlap_grad_reduce",
        {"gradients": {"overlap_grad_reduce": True}},
        covered=(
            "tests/megatron/test_overlap.py::test_gradients_are_those_without_overlap; Megatron's"
            " tests/unit_tests/distributed/test_param_and_grad_buffer.py:272"
        ),
    ),
    Feature(
        "overlap_param_gather",
        {"gradients": {"overlap_param_gather": True}, "optimizer": {"overlap_param_gather": True}},
        wants=("optimizer.distributed", "performance.overlap_grad_reduce"),
        covered="tests/megatron/test_overlap.py::test_parameters_are_those_without_overlap",
    ),
    Feature(
        "batched_p2p",
        {"model": {"batch_p2p_comm": True}},
        needs=("cuda",),
        covered="Megatron's default, megatron/core/model_parallel_config.py:390",
        check="nccl_ranks",
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
        "Transformer Engine's user buffers have one fixed size, but micro-batches here differ in"
        " length"
    ),
}


# reasons why a setting is off that `true` overrides
_CHOICES = (_NOT_AUTOMATIC, _NOT_PROVEN, _ONLY_CUDA) = (
    "performance.automatic is false",
    "not proven",
    "automatic only with CUDA",
)


def device_has() -> frozenset[str]:
    """Returns the requirements that this process's device meets, as a set of keys of NEEDS."""
    return frozenset(need for need, (_, there) in NEEDS.items() if there())


def missing(feature: Feature, has: Collection[str] | None = None) -> list[str]:
    """Returns the names of the feature's requirements that a device does not meet.

    Args:
        has: requirements that the device meets, as keys of NEEDS. None means the requirements that
            the device of this process meets.
    """
    has = device_has() if has is None else has
    return [NEEDS[need][0] for need in feature.needs if need not in has]


def chosen(
    config: Config, shape: ModelShape | None = None, has: Collection[str] | None = None
) -> PerformanceConfig:
    """Returns the settings of `performance`, with null replaced by true or false for each feature.

    Args:
        shape: the shape of the model. If `shape` is None, no feature depends on the shape.
        has: requirements that the device meets, as keys of NEEDS. None means the requirements that
            the device of this process meets.
    """
    off = reasons(config, shape, has)
    values = {
        feature.name: feature.name not in off
        for feature in FEATURES
        if getattr(config.performance, feature.name) is None
    }
    return config.performance.model_copy(update=values)


def reasons(
    config: Config, shape: ModelShape | None = None, has: Collection[str] | None = None
) -> dict[str, str]:
    """Returns a mapping from the name of each feature that is off to the reason why the feature is
    off. Features that are on do not occur in the mapping. The arguments are the same as in
    `chosen`."""
    has = device_has() if has is None else has
    found: dict[str, str] = {}
    for feature in FEATURES:
        asked = getattr(config.performance, feature.name)
        reason = _reason(feature, config, shape, has, found) if asked is None else "set to false"
        if reason and not asked:
            found[feature.name] = reason
    return found


def _reason(
    feature: Feature,
    config: Config,
    shape: ModelShape | None,
    has: Collection[str],
    off: Collection[str],
) -> str:
    """Returns the reason why a feature is off, or "" if it is on. Applies to features whose setting
    is null, which means that the run decides whether the feature is on.

    Args:
        off: names of features in earlier rows that are off.
    """
    if lacking := missing(feature, has):
        return f"needs {' and '.join(lacking)}"
    if not config.performance.automatic:
        return _NOT_AUTOMATIC
    if not feature.proven:
        if not feature.covered:
            return f"{_NOT_PROVEN} by `bash scripts/gpu_check.sh {feature.check}`"
        if "cuda" not in has:
            return _ONLY_CUDA
    for wanted in feature.wants:
        section, _, name = wanted.partition(".")
        asked = getattr(getattr(config, section), name)
        if name in off or asked is False:
            return f"needs {wanted}"
    if feature.name == "rope_fusion" and shape is not None and shape.latent is not None:
        return "latent attention's rotary embedding is not fused"
    if feature.name == "batched_p2p" and _delivers_wrong_chunks(config):
        return "two stages with several chunks"
    return ""


def _delivers_wrong_chunks(config: Config) -> bool:
    """Tells whether batched exchanges between pipeline stages would deliver the tensors of the
    wrong model chunk."""
    return config.parallel.pipeline == 2 and config.parallel.virtual_pipeline > 1


def megatron_fields(performance: PerformanceConfig, part: Part) -> dict[str, Any]:
    """Returns values for the fields of one of Megatron's configurations, as a dict from field names
    to values. The argument `part` selects Megatron's configuration of the model ('model'), of the
    gradients ('gradients') or of the optimizer ('optimizer'). The settings in `performance`
    determine the values. The dict contains every field that a feature can set, even if the feature
    is off. A feature with the value null counts as off. The function `chosen` decides for each
    feature with the value null whether the feature is on, and returns settings that contain true or
    false instead of null. To have features chosen automatically, call `chosen` first, and pass the
    returned settings to `megatron_fields` as the argument `performance`."""
    fields: dict[str, Any] = {}
    for feature in FEATURES:
        on = bool(getattr(performance, feature.name))
        for name, value in feature.sets.get(part, {}).items():
            fields[name] = value if on else fields.get(name, type(value)())
    return fields


def connections(config: Config) -> int | None:
    """Returns the number of hardware queues that a trainer rank gets from CUDA, or None if CUDA
    chooses the number.

    If `performance.cuda_connections` is set, a trainer rank gets this number of hardware queues. If
    `performance.cuda_connections` is null, a trainer rank gets one hardware queue in a run with
    tensor or context parallelism. In a run without tensor parallelism and without context
    parallelism, CUDA chooses the number.

    With tensor or context parallelism, ranks exchange activations inside a layer. Suppose that a
    rank launches first a transfer of activations and then a matrix product. With several queues,
    the GPU can start the matrix product before the transfer. With one queue, the GPU starts
    operations in the order in which the rank launches them, so the transfer starts first.
    Megatron's own launcher also requires one queue (CUDA_DEVICE_MAX_CONNECTIONS=1) on every rank
    that exchanges activations inside a layer.
    """
    if config.performance.cuda_connections is not None:
        return config.performance.cuda_connections
    return 1 if config.parallel.tensor > 1 or config.parallel.context > 1 else None


def environment(config: Config) -> dict[str, str]:
    """Returns environment variables for trainer ranks. CUDA's libraries and torch's allocator read
    these environment variables when they are initialized."""
    named = {
        "CUDA_DEVICE_MAX_CONNECTIONS": connections(config),
        "PYTORCH_CUDA_ALLOC_CONF": config.performance.cuda_allocator,
        # Transformer Engine multiplies float32 as TF32 otherwise, with three digits
        "NVIDIA_TF32_OVERRIDE": 0 if config.model.dtype == "float32" else None,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def keeps_graph(config: Config, micro_batches: int) -> bool:
    """Tells whether training reuses the forward pass that computed the old log-probs, instead of
    running a second forward pass. The forward pass that computes the old log-probs is called the
    log-prob pass.

    Training can reuse the forward pass only if every rank has a single micro-batch in the log-prob
    pass. With several micro-batches, the activations of all of them would have to stay in memory
    until the backward pass. Training can reuse the forward pass only if a step has a single update,
    because later updates would need a forward pass with the changed weights. With several pipeline
    stages or with `moe.routing_replay`, training always runs a second forward pass.

    Args:
        micro_batches: the number of micro-batches of a rank in the log-prob pass.
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
    """Tells whether the responses to a prompt share the prompt in a micro-batch. If the responses
    share the prompt, the model processes the prompt once per micro-batch, and not once per
    response.

    Responses share a prompt only if `performance.share_prompts` is true, sequences are packed and
    the run has no context parallelism. With virtual pipeline stages, each response has its own copy
    of the prompt. Virtual pipeline stages need micro-batches of equal shape, and sharing prompts
    would remove a different number of tokens from each micro-batch. With `moe.routing_replay`, the
    model must process the prompt separately for each response, because the servers return a
    separate choice of experts for each response.
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
    """Raises ConfigError if a setting is not supported or if settings cannot be combined. The
    result of `check_performance` does not depend on the device.

    Args:
        shape: the shape of the model. If `shape` is None, the checks of the model are left out.
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
    if performance.batched_p2p and _delivers_wrong_chunks(config):
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
    """Raises ConfigError if a setting is true and this process's device does not meet the setting's
    requirements."""
    for feature in FEATURES:
        if getattr(performance, feature.name) and (lacking := missing(feature)):
            raise ConfigError(
                f"this setting needs {' and '.join(lacking)}",
                where=f"performance.{feature.name}",
                fix="set it to null",
            )
    given = [
        name
        for name in ("cuda_connections", "cuda_allocator")
        if getattr(performance, name) is not None
    ]
    if given and missing(Feature("", {}, needs=("cuda",))):
        raise ConfigError(
            "this setting needs CUDA", where=f"performance.{given[0]}", fix="set it to null"
        )


def hints(config: Config) -> list[str]:
    """Returns lines for --dry-run. For each setting that is off on this process's device, one line
    gives the reason. If the reason begins with one of `_CHOICES`, the line also suggests the value
    true. For each of Megatron's settings in NOT_OFFERED, one line gives the reason why the package
    does not offer the setting."""
    lines = []
    for name, reason in reasons(config).items():
        # `true` is not refused for these reasons; it may be for another one, which it then names
        how = f"; performance.{name}=true asks for it" if reason.startswith(_CHOICES) else ""
        lines.append(f"off on this machine: performance.{name}, {reason}{how}")
    return lines + [
        f"not offered: performance.{name}: {reason}" for name, reason in NOT_OFFERED.items()
    ]
