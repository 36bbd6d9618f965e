"""Everything that can be known to be wrong before a process is started, checked once and here."""

from __future__ import annotations

import dataclasses

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stare.algorithms.method import Method
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.methods import build_method
from megatron_stare.rollout.build import SGLANG
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.shape import ModelShape, read_shape


def check(config: Config) -> Config:
    """The configuration with every setting of its method spelled out.

    Raises:
        UserError: the first thing that cannot work: method, model, layout or lengths.
    """
    method = build_method(config.algorithm)
    shape = read_shape(config.model.path)
    HfFolder(config.model.path)
    check_reference(config, method, shape)
    check_device(config)
    check_layout(config, shape)
    check_lengths(config, shape)
    check_engine(config)
    return config.model_copy(update={"algorithm": {"name": config.algorithm["name"], **dataclasses.asdict(method)}})


def check_device(config: Config) -> None:
    """Raises ConfigError for what needs CUDA, where there is none; a cluster to be joined is not looked into."""
    if torch.cuda.is_available() or config.runtime.ray_address:
        return
    if config.model.dtype == "bfloat16":
        raise ConfigError("bfloat16 training needs CUDA", where="model.dtype", fix="use float32 on a CPU")
    if config.optimizer.distributed:
        raise ConfigError(
            "Megatron's DistributedOptimizer does not resume exactly without its CUDA optimizers",
            where="optimizer.distributed",
            fix="set it to false on a CPU",
        )
    if config.model.recompute != "none":
        raise ConfigError(
            "activation recompute restores CUDA random states, which a CPU does not have",
            where="model.recompute",
            fix="set it to none, and lower batch.micro_batch_tokens to save memory",
        )


def check_reference(config: Config, method: Method, shape: ModelShape) -> None:
    """Raises UserError where the method needs a reference policy that is not there or is another kind of model."""
    path = config.model.reference_path
    if path is None:
        return
    if not method.needs_reference:
        raise ConfigError(
            "the method uses no reference policy",
            where="model.reference_path",
            fix="set algorithm.reference_kl={coef: ...}, or set it to null",
        )
    HfFolder(path)
    if read_shape(path) != shape:
        raise ConfigError(
            f"{path} is not a model of the same shape as {config.model.path}", where="model.reference_path"
        )


def check_layout(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError for a layout the model cannot be cut into, or that does not run here."""
    parallel = config.parallel
    if parallel.context != 1:
        raise ConfigError(
            "context parallelism is not supported yet: megatron-core has it in Transformer Engine's attention only",
            where="parallel.context",
            fix="set it to 1; tensor parallelism with parallel.sequence=true also spreads long sequences",
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise ConfigError("virtual stages need a pipeline", where="parallel.virtual_pipeline", fix="set it to 1")
    check_stages(config, shape)
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("sequence parallelism needs tensor parallelism", where="parallel.sequence", fix="set false")
    check_experts(config, shape)
    check_tensor(config, shape)


def check_stages(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where the layers cannot be cut into the pipeline's stages."""
    parallel = config.parallel
    first = parallel.first_stage_layers
    if first is None:
        if shape.layers % (parallel.pipeline * parallel.virtual_pipeline):
            raise ConfigError(
                f"{shape.layers} layers cannot be cut into {parallel.pipeline} stages x {parallel.virtual_pipeline} "
                "chunks",
                where="parallel.pipeline",
                fix=f"pipeline x virtual_pipeline must divide {shape.layers}; or set parallel.first_stage_layers",
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


def check_experts(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where experts and layout do not fit."""
    parallel = config.parallel
    if parallel.expert > 1 and not shape.experts:
        raise ConfigError("the model has no experts", where="parallel.expert", fix="set it to 1")
    if shape.experts and shape.experts % parallel.expert:
        raise ConfigError(
            f"{shape.experts} experts cannot be cut over {parallel.expert} ranks", where="parallel.expert"
        )
    ranks = parallel.tensor * parallel.data
    if ranks % parallel.expert:
        raise ConfigError(
            f"a pipeline stage has {ranks} ranks, over which {parallel.expert} expert-parallel ones do not go",
            where="parallel.expert",
            fix=f"use a divisor of {ranks}",
        )
    if shape.experts and parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            "experts under tensor parallelism need sequence parallelism", where="parallel.sequence", fix="set true"
        )


def check_tensor(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where heads or feed-forward columns cannot be cut over the tensor-parallel ranks."""
    parallel = config.parallel
    tp = parallel.tensor
    for what, number in (("attention heads", shape.heads), ("feed-forward columns", shape.ffn)):
        if number % tp:
            raise ConfigError(
                f"{number} {what} cannot be cut over {tp} tensor-parallel ranks",
                where="parallel.tensor",
                fix=f"use a divisor of {number}",
            )
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ConfigError(
            f"{shape.kv_heads} key-value heads cannot be cut over or shared by {tp} tensor-parallel ranks",
            where="parallel.tensor",
            fix=f"use a divisor or a multiple of {shape.kv_heads}",
        )


def check_engine(config: Config) -> None:
    """Raises ConfigError where SGLang is to be started and is not installed, or its settings do not go together."""
    if config.rollout.engine == SGLANG:
        from megatron_stare.rollout.sglang.build import check_servers

        check_servers(config)


def check_lengths(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError where prompt and response do not fit the model or a micro-batch."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    spelled = f"{rollout.max_prompt_tokens} prompt + {rollout.max_new_tokens} new tokens"
    if longest > shape.max_positions:
        raise ConfigError(
            f"{spelled} exceed the model's {shape.max_positions} positions",
            where="rollout.max_new_tokens",
            fix=f"at most {shape.max_positions - rollout.max_prompt_tokens}",
        )
    if longest > config.batch.micro_batch_tokens:
        raise ConfigError(
            f"{spelled} exceed a micro-batch of {config.batch.micro_batch_tokens} tokens",
            where="batch.micro_batch_tokens",
            fix=f"at least {longest}",
        )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises DataError where there is none; nothing is downloaded."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the tokenizer: {error}", where=path) from error
