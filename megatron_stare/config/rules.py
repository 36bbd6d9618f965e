"""Raises ConfigError if a run cannot work with its parallel layout, activation recomputation, MoE
settings, profiling settings or device. The checks are made before any process of the run starts."""

from __future__ import annotations

import importlib.util

import torch

from megatron_stare.config.schema import Config, ModelConfig, MoeConfig, ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.models.shape import ModelShape

_OF_THE_LAYOUT = (
    "the gradient would depend on how a batch is cut, and a step is the same in every layout here:"
    " Megatron's loss is "
)
# why each of Megatron's methods to balance experts is not supported
REFUSED = {
    "aux_loss": _OF_THE_LAYOUT + "of the shares of experts in a micro-batch, padding included",
    "seq_aux_loss": (
        _OF_THE_LAYOUT
        + "of a row of the micro-batch, which packed is all of its sequences together"
    ),
    "global_aux_loss": (
        _OF_THE_LAYOUT + "of the shares in the micro-batches so far, in whatever order they come"
    ),
    "expert_bias": (
        "Megatron would move the bias by how often each expert was chosen, which changes the policy"
        " between the responses and the gradients that they are for. A bias that a checkpoint holds"
        " (e_score_correction_bias of GLM-4.5 and DeepSeek V3) stays as it was loaded; other"
        " families have none"
    ),
}


def check_layout(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError if the model cannot be split into the layout, or if the layout is not
    supported."""
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError(
            "virtual stages need a pipeline", where="parallel.virtual_pipeline", fix="set it to 1"
        )
    check_stages(parallel, shape)
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError(
            "sequence parallelism needs tensor parallelism",
            where="parallel.sequence",
            fix="set false",
        )
    check_experts(parallel, shape)
    check_tensor(parallel, shape)
    check_context(parallel, shape)


def check_stages(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError if the layers cannot be split into the pipeline's stages."""
    first = parallel.first_stage_layers
    if first is None:
        if shape.layers % (parallel.pipeline * parallel.virtual_pipeline):
            raise ConfigError(
                f"{shape.layers} layers cannot be cut into {parallel.pipeline} stages x"
                f" {parallel.virtual_pipeline} chunks",
                where="parallel.pipeline",
                fix=(
                    f"pipeline x virtual_pipeline must divide {shape.layers}; or set"
                    " parallel.first_stage_layers"
                ),
            )
        return
    if parallel.pipeline == 1 or parallel.virtual_pipeline > 1:
        raise ConfigError(
            "a first stage of its own size needs a pipeline without virtual stages",
            where="parallel.first_stage_layers",
            fix="set it to null",
        )
    rest, stages = shape.layers - first, parallel.pipeline - 1
    if rest < stages or rest % stages:
        raise ConfigError(
            f"{first} of {shape.layers} layers leave {rest} for {stages} stages",
            where="parallel.first_stage_layers",
            fix=f"the rest must be a multiple of {stages}, above 0",
        )


def check_experts(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError if the model's experts cannot be split over the ranks of the layout."""
    if parallel.expert > 1 and not shape.experts:
        raise ConfigError("the model has no experts", where="parallel.expert", fix="set it to 1")
    if shape.experts and shape.experts % parallel.expert:
        raise ConfigError(
            f"{shape.experts} experts cannot be cut over {parallel.expert} ranks",
            where="parallel.expert",
        )
    ranks = parallel.tensor * parallel.replicas
    if ranks % parallel.expert:
        raise ConfigError(
            f"the {ranks} ranks of a pipeline stage cannot be divided into groups of"
            f" {parallel.expert} expert-parallel ranks",
            where="parallel.expert",
            fix=f"use a divisor of {ranks}",
        )
    if shape.experts and parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            "experts under tensor parallelism need sequence parallelism",
            where="parallel.sequence",
            fix="set true",
        )


def check_tensor(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError if attention heads, feed-forward columns or the columns of MLA latents
    cannot be split over the tensor-parallel ranks. Also raises ConfigError if the number of
    key-value heads is neither a divisor nor a multiple of the number of tensor-parallel ranks."""
    tp = parallel.tensor
    widths = (shape.ffn, *shape.whole_widths)
    for what, number in (
        ("attention heads", shape.heads),
        *(("feed-forward columns", width) for width in widths),
    ):
        if number % tp:
            raise ConfigError(
                f"{number} {what} cannot be cut over {tp} tensor-parallel ranks",
                where="parallel.tensor",
                fix=f"use a divisor of {number}",
            )
    latent = shape.latent
    for what, number in (
        (("query", latent.query_rank), ("key-value", latent.rank + latent.rotated))
        if latent
        else ()
    ):
        if number % tp:
            raise ConfigError(
                f"the {what} latent's {number} columns cannot be cut over {tp} tensor-parallel"
                " ranks",
                where="parallel.tensor",
                fix=f"use a divisor of {number}",
            )
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ConfigError(
            f"{shape.kv_heads} key-value heads cannot be cut over or shared by {tp} tensor-parallel"
            " ranks",
            where="parallel.tensor",
            fix=f"use a divisor or a multiple of {shape.kv_heads}",
        )


def check_context(parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError if `context_comm` is a2a and the key-value heads cannot be split over the
    context-parallel ranks."""
    heads = shape.kv_heads // parallel.tensor
    if (
        parallel.context > 1
        and parallel.context_comm == "a2a"
        and (heads == 0 or heads % parallel.context)
    ):
        raise ConfigError(
            f"{shape.kv_heads} key-value heads over {parallel.tensor} tensor-parallel ranks cannot"
            f" be cut over {parallel.context} context-parallel ones",
            where="parallel.context_comm",
            fix="use p2p",
        )


def check_recompute(model: ModelConfig, parallel: ParallelConfig, shape: ModelShape) -> None:
    """Raises ConfigError for recompute settings that have no effect. Also raises ConfigError if the
    settings name a module that the model lacks, or if the number of layers to recompute does not
    fit the layers of a stage."""
    read = {
        "none": (),
        "selective": ("recompute_modules",),
        "full": ("recompute_method", "recompute_layers"),
    }
    for name in ("recompute_method", "recompute_layers", "recompute_modules"):
        default = ModelConfig.model_fields[name].default
        if name not in read[model.recompute] and getattr(model, name) != default:
            raise ConfigError(
                f"this setting has no effect with model.recompute={model.recompute}",
                where=f"model.{name}",
                fix="leave it out",
            )
    if model.recompute == "selective":
        for module, there, why in (
            ("moe", shape.experts > 0, "the model has no experts"),
            (
                "mlp",
                shape.experts == 0 or shape.dense_layers > 0,
                "the model's feed-forward layers are nothing but experts",
            ),
        ):
            if module in model.recompute_modules and not there:
                raise ConfigError(why, where="model.recompute_modules", fix=f"leave {module} out")
    if model.recompute != "full":
        return
    for layers in stage_layers(parallel, shape):
        if model.recompute_layers > layers:
            raise ConfigError(
                f"a chunk of a stage has only {layers} layers",
                where="model.recompute_layers",
                fix=f"at most {layers}",
            )
        if model.recompute_method == "uniform" and layers % model.recompute_layers:
            raise ConfigError(
                f"the {layers} layers of a stage's chunk cannot be recomputed in groups of"
                f" {model.recompute_layers}",
                where="model.recompute_layers",
                fix=f"use a divisor of {layers}",
            )


def stage_layers(parallel: ParallelConfig, shape: ModelShape) -> set[int]:
    """Returns the set of the chunk sizes in this layout. A pipeline stage consists of one or
    several chunks, and the size of a chunk is its number of layers. The layout must have passed
    `check_layout`."""
    if (first := parallel.first_stage_layers) is not None:
        return {first, (shape.layers - first) // (parallel.pipeline - 1)}
    return {shape.layers // (parallel.pipeline * parallel.virtual_pipeline)}


def check_moe(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError if the section `moe` is set for a model without experts, or if
    `moe.balance` is not supported."""
    if not shape.experts:
        for name, default in MoeConfig():
            if getattr(config.moe, name) != default:
                raise ConfigError(
                    "the model has no experts", where=f"moe.{name}", fix="leave it out"
                )
    if reason := REFUSED.get(config.moe.balance):
        raise ConfigError(reason, where="moe.balance", fix="use none")


def check_device(config: Config, *, experts: bool) -> None:
    """Raises ConfigError for settings that make training fail on this process's device, or make
    training compute wrong results.

    Args:
        experts: whether the model is a mixture of experts.
    """
    if torch.cuda.is_available():
        _check_cuda(config, experts)


def _check_cuda(config: Config, experts: bool) -> None:
    if experts and not importlib.util.find_spec("transformer_engine"):
        raise ConfigError(
            "on CUDA mixture-of-experts models need Transformer Engine: megatron-core's router"
            " calls a function of it",
            where="model.path",
            fix="install Transformer Engine, use a dense model, or train on CPUs",
        )
    if config.parallel.context > 1 and not importlib.util.find_spec("transformer_engine"):
        raise ConfigError(
            "on CUDA context parallelism needs Transformer Engine's attention",
            where="parallel.context",
            fix="set it to 1, or install Transformer Engine",
        )
    if config.parallel.context > 1 and config.model.dtype == "float32":
        raise ConfigError(
            "Transformer Engine's attention over context ranks takes 16 bits only",
            where="parallel.context",
            fix="set it to 1, or model.dtype to bfloat16 or float16",
        )


def check_profile(config: Config) -> None:
    """Raises ConfigError if a rank or step to profile does not exist."""
    asked = config.observability
    if beyond := [
        each for each in asked.profile_ranks if not 0 <= each < config.parallel.world_size
    ]:
        raise ConfigError(
            f"there is no rank {beyond[0]}: the layout has {config.parallel.world_size}",
            where="observability.profile_ranks",
            fix="name ranks from 0",
        )
    if beyond := [each for each in asked.profile_steps if not 1 <= each <= config.run.steps]:
        raise ConfigError(
            f"there is no step {beyond[0]}: the run has {config.run.steps}",
            where="observability.profile_steps",
            fix="name steps from 1",
        )
