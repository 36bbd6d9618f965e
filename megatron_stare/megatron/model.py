"""Builds the policy as Megatron's GPTModel and fills it from a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn

from megatron_stare.config.schema import ParallelConfig
from megatron_stare.errors import DataError
from megatron_stare.megatron.attention import SdpaCoreAttention
from megatron_stare.megatron.cpu_backend import backend, device
from megatron_stare.megatron.layout import Layout
from megatron_stare.megatron.norm import RMSNorm
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.mapping import rule_for, shard
from megatron_stare.weights.shape import ModelShape


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(shape: ModelShape, parallel: ParallelConfig, dtype: str) -> TransformerConfig:
    """Megatron's description of the model. The loss is scaled by the method, not by Megatron."""
    bf16 = dtype == "bfloat16"
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        sequence_parallel=parallel.sequence,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # every parameter is loaded
        calculate_per_token_loss=True,  # with num_tokens 0 Megatron divides by nothing
        finalize_model_grads_func=finalize_model_grads,  # without it gradients are not reduced over any group
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=has_transformer_engine(),
        gradient_accumulation_fusion=False,
    )


def layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Transformer Engine's layers where it is installed and there is CUDA, else Megatron's local ones with our norm and
    attention."""
    if has_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention: ModuleSpec = layer.submodules.self_attention
    attention.submodules.core_attention = SdpaCoreAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = RMSNorm
        attention.submodules.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)


def build_policy(
    shape: ModelShape, parallel: ParallelConfig, layout: Layout, dtype: str, distributed_optimizer: bool
) -> list[nn.Module]:
    """This rank's model chunks, wrapped for mixed precision and data parallelism. Parameters are not yet loaded."""
    with backend():
        config = transformer_config(shape, parallel, dtype)
        model: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec(config),
            vocab_size=shape.padded_vocab(layout.tp),
            max_sequence_length=shape.max_positions,
            pre_process=layout.pp_rank == 0,
            post_process=layout.last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
        ).to(device())
        if dtype == "bfloat16":
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed_optimizer, grad_reduce_in_fp32=dtype == "bfloat16"
        )
        return [DistributedDataParallel(config=config, ddp_config=ddp, module=model)]


def named_parameters(model: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with Megatron names whose layer numbers are those of the whole model, wrappers stripped."""
    for chunk in model:
        offsets = {
            f"decoder.layers.{i}.": f"decoder.layers.{layer.layer_number - 1}."
            for i, layer in enumerate(unwrap(chunk).decoder.layers)
        }
        for name, parameter in unwrap(chunk).named_parameters():
            prefix = re.match(r"decoder\.layers\.\d+\.", name)
            yield (offsets[prefix.group()] + name[prefix.end() :] if prefix else name), parameter


def unwrap(chunk: Any) -> GPTModel:
    """The GPTModel inside its wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


@torch.no_grad()
def load_hf(model: list[nn.Module], folder: HfFolder, shape: ModelShape, layout: Layout) -> None:
    """Fills every parameter with its slice of the folder's tensors; only that slice is read.

    Raises:
        DataError: a tensor is missing or has the wrong shape.
    """
    for name, parameter in named_parameters(model):
        rule = rule_for(name, shape.family)
        part: Tensor = shard(rule, [folder.slice(hf) for hf in rule.hf], shape, layout.tp_rank, layout.tp)
        if part.shape != parameter.shape:
            raise DataError(
                f"{', '.join(rule.hf)} make a tensor of shape {tuple(part.shape)}, the model wants "
                f"{tuple(parameter.shape)}",
                where=str(folder.path),
                fix="config.json and the weights do not belong together",
            )
        parameter.copy_(part)
