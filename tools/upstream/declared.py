"""What reading our source cannot tell: what lies behind objects that no annotation names, and what we count on without
a call. Every entry names a file of ours and a piece of its text as evidence; a test holds that both are still there.
"""

from __future__ import annotations

from dataclasses import dataclass

from upstream.uses import Arguments, Kind, Use

_CORE = "megatron.core"
_LAYER = f"{_CORE}.transformer.transformer_layer"
_OPTIMIZER = f"{_CORE}.optimizer.optimizer"
_DISTRIBUTED = f"{_CORE}.optimizer.distrib_optimizer.DistributedOptimizer"
_HYBRID = f"{_CORE}.optimizer.cpu_offloading.hybrid_optimizer"
_SCHEDULES = f"{_CORE}.pipeline_parallel.schedules"
_SERIALIZATION = f"{_CORE}.dist_checkpointing.serialization"
_SRT = "sglang.srt"
_MEGATRON = "megatron_stare/megatron"
_SGLANG = "megatron_stare/rollout/engines/sglang"

# what a member is, or what a call of it answers, where the upstream's annotations do not say; "each" of a list
CONTENT: dict[str, tuple[str, ...]] = {
    f"{_CORE}.transformer.spec_utils.ModuleSpec.submodules": (
        f"{_LAYER}.TransformerLayerSubmodules",
        f"{_CORE}.transformer.attention.SelfAttentionSubmodules",
    ),
    f"{_CORE}.transformer.transformer_block.TransformerBlock.layers": ("each", f"{_LAYER}.TransformerLayer"),
    f"{_LAYER}.TransformerLayer.mlp": (f"{_CORE}.transformer.moe.moe_layer.MoELayer",),
    f"{_CORE}.tensor_parallel.get_cuda_rng_tracker": (f"{_CORE}.tensor_parallel.random.CudaRNGStatesTracker",),
    f"{_CORE}.pipeline_parallel.get_forward_backward_func": (
        f"{_SCHEDULES}.forward_backward_no_pipelining",
        f"{_SCHEDULES}.forward_backward_pipelining_without_interleaving",
        f"{_SCHEDULES}.forward_backward_pipelining_with_interleaving",
    ),
}

# classes that objects annotated with their base are of in fact
CONCRETE: dict[str, tuple[str, ...]] = {
    f"{_CORE}.optimizer.MegatronOptimizer": (
        _DISTRIBUTED,
        f"{_OPTIMIZER}.MixedPrecisionOptimizer",
        f"{_OPTIMIZER}.Float16OptimizerWithFloat16Params",
        f"{_OPTIMIZER}.FP32Optimizer",
        f"{_OPTIMIZER}.ChainedOptimizer",
    )
}


@dataclass(frozen=True)
class Declared:
    """A use, and where it shows in our source.

    name: in the upstream; with "module:text", a name or literal that occurs in that module's code.
    why: what we do with it.
    """

    kind: Kind
    name: str
    file: str
    evidence: str
    why: str
    arguments: Arguments = Arguments()  # noqa: RUF009  frozen

    @property
    def use(self) -> Use:
        return Use(self.kind, self.name, self.file, self.arguments)


def _relied(name: str, file: str, evidence: str, why: str) -> Declared:
    return Declared("relied on", name, file, evidence, why)


_CHUNK_CALL = "chunk(tokens, positions, None, packed_seq_params=packing, **as_it_is)"

_MEGATRON_USES = (
    Declared(
        "call",
        f"{_CORE}.models.gpt.GPTModel.forward",
        f"{_MEGATRON}/model/model.py",
        _CHUNK_CALL,
        "a model chunk is called",
        Arguments(3, frozenset({"packed_seq_params"})),
    ),
    Declared(
        "call",
        f"{_CORE}.transformer.module.Float16Module.forward",
        f"{_MEGATRON}/model/model.py",
        _CHUNK_CALL,
        "a model chunk is called",
        Arguments(3, frozenset({"packed_seq_params", "fp32_output"})),
    ),
    Declared(
        "call",
        f"{_CORE}.distributed.DistributedDataParallel.zero_grad_buffer",
        f"{_MEGATRON}/step/passes.py",
        "chunk.zero_grad_buffer()",
        "gradient buffers are emptied",
    ),
    Declared(
        "name",
        f"{_OPTIMIZER}.ChainedOptimizer.chained_optimizers",
        f"{_MEGATRON}/optimizer/optimizer_state.py",
        '"chained_optimizers"',
        "each optimizer of a chain is saved and clipped",
    ),
    Declared(
        "call",
        f"{_CORE}.dist_checkpointing.mapping.LocalNonpersistentObject.unwrap",
        f"{_MEGATRON}/optimizer/optimizer_state.py",
        "value.unwrap()",
        "settings of groups are taken out again",
    ),
    *(
        Declared(
            "spelled", f"{module}:{text}", f"{_MEGATRON}/{file}", f'"{text}"', "a key or attribute that is looked up"
        )
        for module, file, text in (
            (f"{_CORE}.distributed.distributed_data_parallel", "model/head.py", "main_grad"),
            (f"{_CORE}.tensor_parallel.layers", "model/model.py", "tensor_model_parallel"),
            (_OPTIMIZER, "optimizer/optimizer_state.py", "common_step"),
            (_OPTIMIZER, "optimizer/optimizer_state.py", "param_groups"),
            (_HYBRID, "optimizer/distributed_optimizer.py", "master_param"),
            (_HYBRID, "optimizer/optimizer_state.py", "decoupled_grad"),
            (f"{_CORE}.optimizer.distrib_optimizer", "optimizer/optimizer_state.py", "decoupled_grad"),
        )
    ),
    Declared(
        "stand-in",
        f"{_CORE}.transformer.dot_product_attention.DotProductAttention",
        f"{_MEGATRON}/model/attention.py",
        "class SdpaCoreAttention",
        "takes its place in the local layers",
    ),
    Declared(
        "stand-in",
        f"{_CORE}.transformer.torch_norm.WrappedTorchNorm",
        f"{_MEGATRON}/model/local_layers.py",
        "class RMSNorm",
        "takes its place in the local layers",
    ),
    Declared(
        "all fields",
        f"{_CORE}.dist_checkpointing.core.CheckpointingConfig",
        "megatron_stare/weights/files/torch_dist_writer.py",
        "common_backend_version",
        "metadata.json is written field by field",
    ),
    # take_step does by parts what these do: what else stands in them is left out
    *(
        _relied(
            f"{_OPTIMIZER}.{name}.step",
            f"{_MEGATRON}/optimizer/optimizer.py",
            "optimizer.step_with_ready_grads()",
            "done by parts",
        )
        for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
    ),
    _relied(
        f"{_OPTIMIZER}.FP32Optimizer.prepare_grads",
        f"{_MEGATRON}/step/step.py",
        "zero_grad()",
        "grad is a buffer's part",
    ),
    _relied(
        f"{_CORE}.optimizer.get_standard_config_overrides",
        f"{_MEGATRON}/optimizer/optimizer.py",
        "wd_mult",
        "spares norms",
    ),
    _relied(
        f"{_CORE}.optimizer._get_param_groups",
        f"{_MEGATRON}/optimizer/optimizer.py",
        "wd_mult",
        "spares norms weight decay",
    ),
    _relied(
        f"{_DISTRIBUTED}.sharded_param_state_fully_reshardable",
        f"{_MEGATRON}/optimizer/distributed_optimizer.py",
        "fully_reshardable",
        "whose names the optimizer is saved under",
    ),
    _relied(
        f"{_HYBRID}.HybridDeviceOptimizer._sync_sub_optimizers_state_to_hdo",
        f"{_MEGATRON}/optimizer/distributed_optimizer.py",
        "HybridDeviceOptimizer shows those",
        "its state is that of the optimizers on the host, which loading fills in place",
    ),
    _relied(
        f"{_CORE}.distributed.DistributedDataParallel._make_backward_post_hook",
        f"{_MEGATRON}/model/head.py",
        "which its hook leaves as it is",
        "the head adds to main_grad itself",
    ),
    _relied(
        f"{_SCHEDULES}.forward_step_calc_loss",
        f"{_MEGATRON}/step/passes.py",
        "with 0 tokens Megatron divides",
        "a scaled loss stays as it is",
    ),
    _relied(
        f"{_CORE}.distributed.finalize_model_grads",
        f"{_MEGATRON}/model/model.py",
        "finalize_model_grads_func=finalize_model_grads",
        "gradients are reduced, and divided by nothing",
    ),
    _relied(
        f"{_CORE}.pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes",
        f"{_MEGATRON}/model/model.py",
        "Two stages of several chunks would exchange lengths",
        "why variable_seq_lengths is off there",
    ),
    _relied(
        f"{_CORE}.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec",
        f"{_MEGATRON}/model/model.py",
        "layer.submodules.pre_mlp_layernorm = RMSNorm",
        "its norms and core attention are replaced",
    ),
    *(
        _relied(
            f"{_CORE}.transformer.attention.{name}",
            f"{_MEGATRON}/model/attention.py",
            "those megatron-core gives any core attention",
            "makes and calls our core attention",
        )
        for name in ("Attention.__init__", "Attention.forward")
    ),
    _relied(
        f"{_CORE}.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding.__init__",
        f"{_MEGATRON}/model/model.py",
        "rotary_pos_emb.inv_freq",
        "its frequencies are replaced",
    ),
    _relied(
        f"{_CORE}.transformer.moe.moe_utils.topk_routing_with_score_function",
        "megatron_stare/models/qwen3_moe.py",
        "softmax over the chosen experts",
        "routing as transformers does it",
    ),
    Declared(
        "name",
        f"{_CORE}.transformer.moe.router.TopKRouter.router_replay",
        f"{_MEGATRON}/model/routing_replay.py",
        "router.router_replay = GivenExperts()",
        "is asked for the experts of every token",
    ),
    # the files of a checkpoint, which are read and written without Megatron too
    _relied(
        f"{_SERIALIZATION}.save", "megatron_stare/weights/files/torch_dist_writer.py", '"common.pt"', "files it has"
    ),
    _relied(
        f"{_SERIALIZATION}.load_common_state_dict",
        "megatron_stare/weights/files/torch_dist_writer.py",
        '"common.pt"',
        "files it has",
    ),
)

_SGLANG_USES = (
    Declared(
        "all fields",
        f"{_SRT}.sampling.sampling_params.SamplingParams",
        f"{_SGLANG}/protocol.py",
        "Every field that shapes a response",
        "no default of a release has a say",
    ),
    *(
        Declared("spelled", f"{_SRT}.{module}:{text}", f"{_SGLANG}/{file}", f'"{text}"', "is read of answers")
        for module, file, texts in (
            (
                "managers.tokenizer_manager",
                "protocol.py",
                ("meta_info", "output_ids", "prompt_tokens", "finish_reason"),
            ),
            ("managers.tokenizer_manager", "protocol.py", ("output_token_logprobs", "input_token_logprobs")),
            ("managers.tokenizer_manager", "protocol.py", ("routed_experts",)),
            ("utils.weight_versions", "protocol.py", ("weight_versions", "start", "end", "version")),
            ("utils.weight_checker", "client.py", ("checksums",)),
            ("entrypoints.http_server", "client.py", ("ranks", "success")),
            ("entrypoints.http_server", "server_engine.py", ("version",)),
            ("managers.scheduler", "server_engine.py", ("max_total_num_tokens",)),
        )
        for text in texts
    ),
    *(
        Declared(
            "spelled",
            f"{_SRT}.arg_groups.choices:{text}",
            f"{_SGLANG}/server_options.py",
            f'"{text}"',
            "value of a flag",
        )
        for text in ("torch_native", "pytorch", "dummy")
    ),
    Declared(
        "spelled",
        f"{_SRT}.platforms:SGLANG_USE_CPU_ENGINE",
        f"{_SGLANG}/serve.py",
        '"SGLANG_USE_CPU_ENGINE"',
        "is kept from servers",
    ),
    *(
        Declared(
            "spelled", f"{_SRT}.plugins:{_SRT}.{group}", "pyproject.toml", f'"{_SRT}.{group}"', "finds the plug-ins"
        )
        for group in ("platforms", "plugins")
    ),
    *(
        _relied(f"{_SRT}.{name}", f"{_SGLANG}/served_hash.py", "first 64 bits of SHA-256", "is computed here too")
        for name in (
            "utils.weight_checker._hash_tensor",
            "utils.weight_checker.WeightChecker._compute_checksum",
            "managers.mm_utils.tensor_hash",
        )
    ),
    _relied(
        f"{_SRT}.utils.common.init_custom_process_group",
        f"{_SGLANG}/broadcast.py",
        "PrefixStore(name, self._store)",
        "the group is met under these keys",
    ),
    _relied(
        f"{_SRT}.managers.scheduler.Scheduler.pause_generation",
        f"{_SGLANG}/client.py",
        "SGLang's third, in_place",
        "which ways to pause lose nothing",
    ),
    _relied(
        f"{_SRT}.managers.schedule_batch.Req.update_finish_state",
        f"{_SGLANG}/protocol.py",
        "the server looks at the length first",
        "why a response ended",
    ),
    _relied(
        f"{_SRT}.sampling.sampling_params.SamplingParams.verify",
        f"{_SGLANG}/protocol.py",
        '"no_stop_trim": True',
        "what is refused of the fields that are sent",
    ),
    _relied(
        f"{_SRT}.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        f"{_SGLANG}/server_layout.py",
        "CPU_WIDTHS = 32",
        "what is padded on a CPU",
    ),
    _relied(
        f"{_SRT}.state_capturer.base.BaseTopkCapturer.get_topk",
        f"{_SGLANG}/protocol.py",
        "all but the last, which the server's model was never fed",
        "which tokens' experts are named",
    ),
    _relied(
        f"{_SRT}.utils.weight_versions.compute_weight_version_spans",
        f"{_SGLANG}/protocol.py",
        'span["start"] != end',
        "spans that follow each other",
    ),
)

DECLARED = _MEGATRON_USES + _SGLANG_USES
