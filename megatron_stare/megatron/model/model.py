"""Builds the policy as Megatron's GPTModel and loads its weights from a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from megatron_stare.config.performance import megatron_fields
from megatron_stare.config.schema import ModelConfig, MoeConfig, ParallelConfig, PerformanceConfig
from megatron_stare.errors import DataError
from megatron_stare.megatron.backend.cpu_backend import backend, device, has_transformer_engine
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.batching.packing import PackedSequences
from megatron_stare.megatron.model.attention import SdpaCoreAttention
from megatron_stare.megatron.model.latent_attention import LatentAttention
from megatron_stare.megatron.model.local_layers import RMSNorm, SwiGlu
from megatron_stare.megatron.upstream import mlp_submodules
from megatron_stare.models import family_of, rule_for
from megatron_stare.models.rope import scaled_frequencies
from megatron_stare.models.rules import shard
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.hf_folder import HfFolder


class PolicyModel(GPTModel):
    """GPTModel that returns the hidden states [s, b, H] after the last norm, for
    megatron/model/head.py.

    This class skips GPTModel's output layer, because that layer would compute the logits of every
    position. If packed sequences come without their boundaries (`cu_seqlens_q` is None), this class
    passes the rotary embedding of every token [t, 1, d] to Megatron. Megatron then rotates all
    queries and keys [t, n, d] in one operation.
    """

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        made = super()._preprocess(
            input_ids, position_ids, *args, packed_seq_params=packed_seq_params, **kwargs
        )
        hidden, rotary, *others = made
        if packed_seq_params is None or packed_seq_params.cu_seqlens_q is not None:
            return made
        if rotary is None:  # latent attention makes its own
            packed_seq_params.tokens = position_ids.flatten()
            return made
        return hidden, rotary.index_select(0, position_ids.flatten()).squeeze(1), *others

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


_DEFAULT = PerformanceConfig()
_MOE = MoeConfig()
_ROUTER_DTYPES = {"model": None, "float32": "fp32", "float64": "fp64"}


def recomputation(model: ModelConfig) -> dict[str, Any]:
    """Returns Megatron's settings for the recomputation of activations in backward."""
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        return {
            "recompute_granularity": "selective",
            "recompute_modules": list(model.recompute_modules),
        }
    return {
        "recompute_granularity": "full",
        "recompute_method": model.recompute_method,
        "recompute_num_layers": model.recompute_layers,
    }


def transformer_config(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    performance: PerformanceConfig = _DEFAULT,
    moe: MoeConfig = _MOE,
) -> TransformerConfig:
    """Returns Megatron's configuration of the model. The RL method normalises the loss, so this
    configuration keeps Megatron from dividing the loss again."""
    dtype = getattr(torch, model.dtype)
    tuned = megatron_fields(performance, "model")
    if shape.latent:
        # Megatron's kernel for latent attention supports only one setting of YaRN
        tuned.pop("apply_rope_fusion", None)
    kind = MLATransformerConfig if shape.latent else TransformerConfig
    return kind(
        **family_of(shape).megatron_config(shape),
        softmax_scale=scaled_frequencies(shape)[1]
        if shape.rope_scaling and not shape.latent
        else None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline
        if parallel.virtual_pipeline > 1
        else None,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        context_parallel_size=parallel.context,
        cp_comm_type=parallel.context_comm,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.sequence,
        pipeline_dtype=dtype,
        # Every micro-batch has its own length. Stages of several chunks would exchange lengths in a
        # batch of messages that gloo matches by order, and could confuse them. With several chunks,
        # micro-batches therefore have one length (microbatch.py).
        variable_seq_lengths=parallel.pipeline > 1 and parallel.virtual_pipeline == 1,
        overlap_p2p_comm=False,
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device().type == "cpu",
        init_model_with_meta_device=device().type == "meta",
        perform_initialization=False,  # every parameter is loaded
        calculate_per_token_loss=True,  # with num_tokens 0, Megatron does not divide the loss
        # without this function Megatron reduces gradients over no group
        finalize_model_grads_func=finalize_model_grads,
        masked_softmax_fusion=False,
        persist_layer_norm=has_transformer_engine(),
        **recomputation(model),
        **tuned,
        # Megatron's switch for an activation from the layer spec; experts do not support it
        use_te_activation_func=not (
            has_transformer_engine() or shape.experts or tuned.get("bias_activation_fusion")
        ),
        # Megatron needs a dispatcher for variable lengths in a pipeline even in dense models. Ranks
        # hold different numbers of tokens, hence alltoall.
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype=_ROUTER_DTYPES[moe.router_dtype],
        moe_grouped_gemm=shape.experts > 0 and has_transformer_engine(),
    )


def layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Returns Transformer Engine's layers if Transformer Engine and CUDA are available. Otherwise,
    the returned layers are Megatron's local layers with this project's norm, activation and
    attention."""
    if has_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    places = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    alike = {
        routed: _local_layer(config, routed)
        for routed in {_has_experts(config, place) for place in places}
    }
    layers = [alike[_has_experts(config, place)] for place in places]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _has_experts(config: TransformerConfig, layer: int) -> bool:
    """Returns True if a layer has experts. `layer` is the layer's number in the whole model,
    counted from 0."""
    every = config.moe_layer_freq
    return config.num_moe_experts is not None and (isinstance(every, int) or every[layer] == 1)


def _local_layer(config: TransformerConfig, routed: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if routed else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.use_te_activation_func:
        mlp_submodules(layer).activation_func = SwiGlu
    attention: ModuleSpec = layer.submodules.self_attention
    attention.submodules.core_attention = SdpaCoreAttention
    if config.multi_latent_attention:
        attention.module = LatentAttention
        attention.submodules.q_layernorm = RMSNorm
        attention.submodules.kv_layernorm = RMSNorm
    elif config.qk_layernorm:
        attention.submodules.q_layernorm = RMSNorm
        attention.submodules.k_layernorm = RMSNorm
    return layer


def build_policy(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    distributed_optimizer: bool,
    performance: PerformanceConfig = _DEFAULT,
    moe: MoeConfig = _MOE,
) -> list[nn.Module]:
    """Builds this rank's model chunks, with gradient buffers that are reduced over data-parallel
    ranks. Does not load parameters."""
    parts = build_model(shape, model, parallel, layout, performance, moe)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed_optimizer,
        grad_reduce_in_fp32=model.dtype != "float32",
        bucket_size=performance.gradient_bucket,
        **megatron_fields(performance, "gradients"),
    )
    with backend():
        wrapped = [
            DistributedDataParallel(config=unwrap(p).config, ddp_config=ddp, module=p)
            for p in parts
        ]
    # Megatron enters no_sync for all but the last micro-batch, whose backward reduces the
    # gradients.
    if ddp.overlap_grad_reduce:
        no_sync = [part.no_sync for part in wrapped]
        unwrap(wrapped[0]).config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    return wrapped


def build_model(
    shape: ModelShape,
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    performance: PerformanceConfig = _DEFAULT,
    moe: MoeConfig = _MOE,
) -> list[nn.Module]:
    """Builds this rank's model chunks, wrapped for mixed precision. Does not load parameters."""
    chunks = parallel.virtual_pipeline
    with backend():
        config = transformer_config(shape, model, parallel, performance, moe)
        parts: list[nn.Module] = []
        for chunk in range(chunks):
            vp_stage = chunk if chunks > 1 else None
            part: nn.Module = PolicyModel(
                config=config,
                transformer_layer_spec=layer_spec(config, vp_stage),
                vocab_size=shape.padded_vocab(layout.tp),
                pre_process=layout.pp_rank == 0 and chunk == 0,
                post_process=layout.last_stage and chunk == chunks - 1,
                parallel_output=True,
                **family_of(shape).megatron_model(shape),
                vp_stage=vp_stage,
            ).to(device())
            if shape.rope_scaling:  # megatron-core supports only one setting of one scaling
                whole = unwrap(part)
                each = (
                    [layer.self_attention for layer in whole.decoder.layers]
                    if shape.latent
                    else [whole]
                )
                for module in each:
                    module.rotary_pos_emb.inv_freq = scaled_frequencies(shape)[0].to(device())
            mark_cut_parameters(part, shape)
            if model.dtype != "float32":
                part = Float16Module(config, part)
                for _, bias in expert_biases([part]):
                    # Megatron would make it float32 too, but only after rounding the loaded values.
                    bias.data = bias.data.float()
            parts.append(part)
        return parts


def mark_cut_parameters(part: nn.Module, shape: ModelShape) -> None:
    """Marks the parameters that are split across tensor-parallel ranks. Megatron reads these marks.

    Megatron sets the same marks itself, but only during the initialisation of parameters. A run
    loads its parameters and does not initialise them. Megatron assumes that an unmarked parameter
    is the same on all tensor-parallel ranks, and computes the gradient norm from the first rank's
    copy only. If a split parameter had no mark, the gradient norm would contain only the first
    tensor-parallel rank's part of this parameter.
    """
    tensor = unwrap(part).config.tensor_model_parallel_size
    for name, parameter in named_parameters([part]):
        rule = rule_for(name, shape)
        layout = rule.layout
        if layout == "column" and len(parameter) == family_of(shape).size(rule.hf[0], shape)[0]:
            # Transformer Engine keeps projections into latents whole on every rank
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
        elif layout != "replicated" and "tensor_model_parallel" not in vars(parameter):
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride"):
                # on the meta device Transformer Engine's layers set only the last attribute
                vars(parameter).pop(attribute, None)
            set_tensor_model_parallel_attributes(parameter, True, 1 if layout == "row" else 0, 1)
        if is_expert(name) and tensor > 1:
            # Every tensor-parallel rank has whole experts and routes its own tokens to them, so
            # experts' gradients are summed over these ranks too. Megatron does that by itself only
            # if experts are cut over ranks.
            parameter.allreduce = False  # type: ignore[attr-defined]


def named_parameters(model: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields parameters with their Megatron names, without the prefixes of wrappers. Layers and
    experts are numbered as in the whole model."""
    for chunk in model:
        for name, parameter in unwrap(chunk).named_parameters():
            yield _whole_name(chunk, name), parameter


def expert_biases(model: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields one pair for each router: the name of the router's expert biases, and the expert
    biases as a tensor [E] float32. Expert biases are named like Megatron's parameters. No optimizer
    updates expert biases."""
    for chunk in model:
        for name, buffer in unwrap(chunk).named_buffers():
            if name.endswith(".expert_bias"):
                yield _whole_name(chunk, name), buffer


def named_weights(model: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields all weights that a checkpoint holds: parameters and expert biases."""
    yield from named_parameters(model)
    yield from expert_biases(model)


def _whole_name(chunk: nn.Module, name: str) -> str:
    """Replaces the layer and expert numbers in a chunk's parameter name with the numbers in the
    whole model."""
    if local := re.match(r"decoder\.layers\.(\d+)\.", name):
        layer = unwrap(chunk).decoder.layers[int(local.group(1))]
        name = f"decoder.layers.{layer.layer_number - 1}.{name[local.end() :]}"
        if expert := _EXPERT.search(name):
            number = layer.mlp.local_expert_indices[int(expert.group(1))]
            name = f"{name[: expert.start(1)]}{number}{name[expert.end(1) :]}"
    return name


# an expert's number, in the name of its own module or of its weight in a grouped GEMM
_EXPERT = re.compile(r"(?<=\.experts\.)(?:local_experts\.|linear_fc[12]\.weight)(\d+)")


def is_expert(name: str) -> bool:
    """Returns True if a parameter belongs to one expert. No expert is ever split across
    tensor-parallel ranks."""
    return _EXPERT.search(name) is not None


def part_of(name: str, weight: Tensor, layout: Layout) -> tuple[int, int]:
    """Returns two numbers: the index of this rank's part of a weight, and the number of parts of
    the weight. `shard` and `Shard` take these two numbers as arguments."""
    cut = getattr(weight, "tensor_model_parallel", False) and not is_expert(name)
    return (layout.tp_rank, layout.tp) if cut else (0, 1)


def hidden_states(
    chunk: nn.Module, tokens: Tensor, positions: Tensor, packing: PackedSequences | None
) -> Tensor:
    """Runs a model chunk and returns the output in the model's precision. By default, Float16Module
    would convert the last stage's output to float32."""
    inside = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
    as_it_is = {"fp32_output": False} if isinstance(inside, Float16Module) else {}
    return chunk(tokens, positions, None, packed_seq_params=packing, **as_it_is)


def finish_gather(model: list[nn.Module]) -> None:
    """Gathers the updated parameters from all ranks immediately, so that other code can read the
    parameters before the next forward pass. If `overlap_param_gather` is on, Megatron does not
    gather the updated parameters until the next forward pass. If `overlap_param_gather` is off,
    `finish_gather` does nothing. All ranks must call `finish_gather`."""
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            with backend():
                chunk.start_param_sync(force_sync=True)


def gradient_buffers(model: Iterable[nn.Module]) -> Iterator[Any]:
    """Yields Megatron's flat gradient buffers. With the distributed optimizer, Megatron's gradient
    buffers also hold the parameters."""
    for chunk in model:
        yield from chunk.buffers  # type: ignore[misc]
        yield from chunk.expert_parallel_buffers  # type: ignore[misc]


def unwrap(chunk: Any) -> GPTModel:
    """Returns the GPTModel of a model chunk, without the wrappers for mixed precision and data
    parallelism."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


@torch.no_grad()
def load_hf(model: list[nn.Module], folder: HfFolder, shape: ModelShape, layout: Layout) -> None:
    """Loads this rank's parameters and expert biases from the Hugging Face folder. Reads only the
    slices that this rank needs.

    Raises:
        DataError: a tensor is missing or has the wrong shape.
    """
    for name, parameter in named_weights(model):
        rule = rule_for(name, shape)
        slices = [folder.slice(hf) for hf in rule.hf]
        part: Tensor = shard(rule, slices, shape, *part_of(name, parameter, layout))
        if part.shape != parameter.shape:
            raise DataError(
                f"{', '.join(rule.hf)} make a tensor of shape {tuple(part.shape)}, the model wants "
                f"{tuple(parameter.shape)}",
                where=str(folder.path),
                fix="config.json and the weights do not belong together",
            )
        parameter.copy_(part)
