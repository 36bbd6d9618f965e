"""Everything that can be known to be wrong before a process is started, checked once and here."""

from __future__ import annotations

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.registry import build_method
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.shape import ModelShape, read_shape


def check(config: Config) -> None:
    """Raises UserError for the first thing that cannot work: model, layout, lengths or method."""
    build_method(config.algorithm)
    shape = read_shape(config.model.path)
    HfFolder(config.model.path)
    check_layout(config, shape)
    check_lengths(config, shape)
    if config.model.dtype == "bfloat16" and not torch.cuda.is_available() and not config.runtime.ray_address:
        raise ConfigError("bfloat16 training needs CUDA", where="model.dtype", fix="use float32 on a CPU")


def check_layout(config: Config, shape: ModelShape) -> None:
    """Raises ConfigError for a layout the model cannot be cut into, or that is not supported."""
    parallel = config.parallel
    for key in ("pipeline", "virtual_pipeline", "context", "expert"):
        if getattr(parallel, key) != 1:
            raise ConfigError(f"{key} parallelism is not supported yet", where=f"parallel.{key}", fix="set it to 1")
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
