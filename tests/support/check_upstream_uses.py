"""What parts of this project that are still to come may use of their upstreams: parallel and asynchronous checkpoints,
context parallelism, Transformer Engine's layers, grouped experts, other optimizers, SGLang on GPUs.

As megatron-core 0.16.1 and SGLang 0.5.21 have it. tools/check_upstream.py reads this file; nothing imports it.
"""

from __future__ import annotations

from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
    load_sharded_metadata,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy, get_default_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling, verify_checkpoint_and_load_strategy
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec, get_mlp_module_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.muon import TensorParallelMuon, get_megatron_muon_optimizer
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.moe_utils import permute, track_moe_metrics
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_batch_on_this_cp_rank, get_thd_batch_on_this_cp_rank
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import build_flat_input_top_logprobs_arrays
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.utils.common import add_prometheus_track_response_middleware, init_custom_process_group


def save_in_background(state: dict[str, Any], folder: str, queue: AsyncCallsQueue) -> None:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True, independent_all_gather=True)
    parallel = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist", 1), group)
    request = dist_checkpointing.save(state, folder, parallel, common_strategy=("torch", 1), async_sharded_save=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)


def load(folder: str) -> Any:
    strategy, common = verify_checkpoint_and_load_strategy(folder)
    load_sharded_metadata(folder, strategy, common_strategy=common)
    return dist_checkpointing.load(
        {}, folder, get_default_load_sharded_strategy(folder), strict=StrictHandling.RAISE_ALL
    )


def strategies() -> list[SaveShardedStrategy]:
    return [TorchDistSaveShardedStrategy("torch_dist", 1), get_default_strategy("save_sharded", "torch_dist", 1)]


def join() -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2, create_all_gather_group=True)


def config() -> tuple[TransformerConfig, DistributedDataParallelConfig]:
    return (
        TransformerConfig(
            num_layers=1,
            num_attention_heads=1,
            moe_use_legacy_grouped_gemm=True,
            moe_deepep_num_sms=20,
            moe_hybridep_num_sms=16,
            cuda_graph_scope="full",
            cuda_graph_use_single_mempool=True,
            async_tensor_model_parallel_allreduce=True,
            moe_extended_tp=False,
        ),
        DistributedDataParallelConfig(preserve_fp32_weights=True),
    )


def layers() -> list[Any]:
    return [
        get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_use_legacy_grouped_gemm=False),
        get_moe_module_spec(num_experts=8, moe_use_legacy_grouped_gemm=False),
        get_mlp_module_spec(use_te=True),
        MoESubmodules(),
        MLPSubmodules(),
        SelfAttentionSubmodules(linear_qkv=None, core_attention=None),
        GroupedMLP,
        SequentialMLP,
    ]


class Layer(TransformerLayer):
    def _forward_mlp(self, hidden_states: Any, inference_context: Any = None, padding_mask: Any = None) -> Any:
        return hidden_states


def split(batch: dict[str, Any], lengths: Any) -> Any:
    get_thd_batch_on_this_cp_rank(batch, lengths, lengths, lengths)
    return get_batch_on_this_cp_rank(batch)


def compute(tokens: Any, weight: Any, routing: Any) -> Any:
    permuted, *_ = permute(tokens, routing)
    track_moe_metrics(1.0, 1, None)
    return linear_with_grad_accumulation_and_async_allreduce(
        permuted,
        weight,
        bias=None,
        gradient_accumulation_fusion=False,
        allreduce_dgrad=False,
        async_grad_allreduce=None,
    )


def optimizer(model: list[Any]) -> MegatronOptimizer:
    settings = OptimizerConfig(optimizer="muon", muon_use_nesterov=True)
    assert TensorParallelMuon
    return get_megatron_muon_optimizer(settings, model, layer_wise_distributed_optimizer=True)


def sampling() -> SamplingParams:
    return SamplingParams(temperature=1.0)


class GpuPlatform(SRTPlatform):
    def get_mha_kv_pool_cls(self) -> type:
        return object

    def get_graph_runner_cls(self) -> type:
        return object

    def supports_fp8(self) -> bool:
        return True

    def support_cuda_graph(self) -> bool:
        return True


class OwnSampler(Sampler):
    def forward(self, *arguments: Any) -> Any:
        return super().forward(*arguments)


def flat(values: Any, app: Any) -> Any:
    add_prometheus_track_response_middleware(app)
    init_custom_process_group(backend="gloo", init_method="tcp://localhost:1", world_size=1, rank=0)
    return build_flat_input_top_logprobs_arrays(values, values, 2)
