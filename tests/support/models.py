"""Tiny random Hugging Face models with the odd features that real ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 37,  # needs padding at every layout
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
# DeepSeek-R1-0528-Qwen3-8B's attn_factor: 1 / (0.1 * log(factor) + 1)
UNDOES_YARN = 0.8782488562869419

LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",  # fields of published configurations that transformers does not know
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied_llama3": lambda: LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "mistral": lambda: MistralConfig(
        **SIZES, head_dim=16, tie_word_embeddings=False, sliding_window=64
    ),
    "phi3": lambda: Phi3Config(**SIZES, tie_word_embeddings=False),
    "qwen2_yarn": lambda: Qwen2Config(
        **SIZES, tie_word_embeddings=False, rope_parameters=YARN_ROPE
    ),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3_tied": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "glm4_moe": lambda: Glm4MoeConfig(  # every feature on, also those that are never on together
        **SIZES,
        head_dim=16,
        partial_rotary_factor=0.5,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        tie_word_embeddings=False,
    ),
    "glm4_moe_air": lambda: Glm4MoeConfig(  # as GLM-4.5-Air has them
        **SIZES,
        attention_bias=True,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=2,
        tie_word_embeddings=False,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **LATENT,
        q_lora_rank=20,
        n_routed_experts=8,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    # a context that was not extended, experts without groups
    "deepseek_v3_short": lambda: DeepseekV3Config(
        **LATENT,
        q_lora_rank=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}

MIXTURES = ("qwen3_moe", "glm4_moe", "glm4_moe_air", "deepseek_v3", "deepseek_v3_short")

# layouts of tests/megatron/test_parity.py in which a family is held against transformers in every
# run of the tests; the slow ones hold every family in more of them
PARITY = [
    ("qwen2", "tp2-pp2"),
    ("qwen2_yarn", "tp2"),
    ("qwen3_tied", "pp2-vpp2"),
    ("qwen3", "tp4-shared-kv"),
    ("qwen3", "tp2-sp-pp2"),
    ("llama", "tp2-pp2"),
    ("llama_tied_llama3", "tp4-shared-kv"),
    ("mistral", "tp2-pp2"),
    ("phi3", "tp2-sp-pp2"),
    ("phi3", "tp4-shared-kv"),
]

GONE: Any = object()  # for a field that config.json does not have
# changes of a tiny model's config.json, and what the refusal says
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mamba"}, "model family 'mamba' is unknown"),
    (
        "llama",
        {"model_type": "gpt_oss"},
        "gpt-oss (model family 'gpt_oss') is not supported; missing: attention with",
    ),
    (
        "llama",
        {"model_type": "qwen3_next"},
        "Qwen3-Next (model family 'qwen3_next') is not supported; missing: most",
    ),
    (
        "llama",
        {"model_type": "kimi_k2"},
        "Kimi-K2 (model family 'kimi_k2') is not supported; missing: weights in 8",
    ),
    ("llama", {"model_type": GONE}, "model family None is unknown"),
    ("llama", {"attention_bias": True}, "output projection (attention_bias) is not supported"),
    ("llama", {"mlp_bias": True}, "feed-forward layers (mlp_bias) is not supported"),
    (
        "qwen2",
        {"use_sliding_window": True},
        "sliding-window attention (use_sliding_window) is not supported",
    ),
    ("qwen3", {"attention_bias": True}, "output projection (attention_bias) is not supported"),
    (
        "qwen3",
        {"rope_parameters": {"rope_type": "longrope"}},
        "RoPE scaling 'longrope' is not supported",
    ),
    (
        "llama",
        {"rope_parameters": GONE, "rope_scaling": {"type": "dynamic"}},
        "RoPE scaling 'dynamic'",
    ),
    (
        "llama",
        {"partial_rotary_factor": 0.5},
        "each head (partial_rotary_factor 0.5) is not supported",
    ),
    (
        "qwen2",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        "factor 0.75) is not",
    ),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "sliding_attention (layer_types) is not",
    ),
    ("llama", {"hidden_act": "gelu"}, "the activation gelu (hidden_act) is not supported"),
    (
        "qwen3_moe",
        {"mlp_only_layers": [1]},
        "mixtures of dense and expert layers are not supported",
    ),
    (
        "qwen3_moe",
        {"decoder_sparse_step": 2},
        "mixtures of dense and expert layers are not supported",
    ),
    ("qwen3_moe", {"num_experts_per_tok": GONE}, "the field 'num_experts_per_tok' is missing"),
    (
        "glm4_moe",
        {"n_shared_experts": 0},
        "without an expert for every token (n_shared_experts) is not",
    ),
    (
        "glm4_moe",
        {"first_k_dense_replace": 4},
        "4 leading dense layers (first_k_dense_replace) of 4 leave none",
    ),
    (
        "glm4_moe",
        {"norm_topk_prob": False},
        "not renormalised (norm_topk_prob: false) are not supported",
    ),
    (
        "glm4_moe",
        {"topk_group": 3},
        "4 experts a token from 3 of 4 groups (n_group, topk_group) are not supported",
    ),
    (
        "glm4_moe",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "RoPE scaling 'yarn' is not supported",
    ),
    ("glm4_moe", {"n_routed_experts": GONE}, "the field 'n_routed_experts' is missing"),
    (
        "deepseek_v3",
        {"rope_interleave": False},
        "rotating halves of a head (rope_interleave: false) is not",
    ),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}, "an rms_norm_eps of 1e-05 is not supported"),
    (
        "deepseek_v3",
        {"attention_bias": True},
        "biases in the attention's projections (attention_bias) is not",
    ),
    (
        "deepseek_v3",
        {"scoring_func": "softmax"},
        "experts chosen by softmax (scoring_func) are not supported",
    ),
    (
        "deepseek_v3",
        {"topk_method": "greedy"},
        "experts chosen by greedy (topk_method) are not supported",
    ),
    (
        "deepseek_v3",
        {"rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.0}},
        "(mscale 0.7, mscale_",
    ),
    (
        "deepseek_v3",
        {"rope_parameters": YARN_ROPE},
        "the rotated part of a head alone (mscale None, mscale_all",
    ),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        "RoPE scaling 'llama3' is not",
    ),
    (
        "deepseek_v3",
        {"moe_layer_freq": 2},
        "experts in one layer of 2 (moe_layer_freq) are not supported",
    ),
    (
        "deepseek_v3",
        {"q_lora_rank": None},
        "queries without a latent (q_lora_rank: null) are not supported",
    ),
    ("deepseek_v3", {"kv_lora_rank": GONE}, "the field 'kv_lora_rank' is missing"),
    ("qwen2", {"num_hidden_layers": GONE}, "the field 'num_hidden_layers' is missing"),
    (
        "mistral",
        {"sliding_window": 63},
        "the last 63 of 64 positions (sliding_window) is not supported",
    ),
    (
        "phi3",
        {"sliding_window": 63},
        "the last 63 of 64 positions (sliding_window) is not supported",
    ),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope"}, "rope_parameters": GONE},
        "RoPE scaling 'longrope' is not",
    ),
    (
        "qwen3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "quantised weights (quantization_config) are not supported",
    ),
    (
        "qwen2",
        {"rope_parameters": {**YARN_ROPE, "attn_factor": UNDOES_YARN}},
        "write attention_factor 1.0 beside attn_factor; deleting attn_factor makes another model",
    ),
    (
        "qwen2",
        {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.0}},
        "write attn_factor 0.878248856 beside attention_factor",
    ),
    (
        "qwen2",  # the two factors of the same name
        {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.1, "attn_factor": 1.1}},
        "servers scale YaRN by attn_factor, and transformers by attention_factor",
    ),
    (
        "qwen2",
        {"rope_parameters": {**YARN_ROPE, "magnitude": 0.878}},
        "magnitude in rotary parameters of type 'yarn' is not supported",
    ),
    (
        "deepseek_v3",
        {
            "rope_parameters": {
                **YARN_ROPE,
                **dict.fromkeys(("mscale", "mscale_all_dim"), 1.0),
                **dict.fromkeys(("attn_factor", "attention_factor"), 0.9),
            }
        },
        "mscale_all_dim 1.0, attention_factor 0.9) is not supported",
    ),
    (
        "llama",
        {"rope_parameters": GONE, "rope_theta": 1e4, "rope_scaling": {"factor": 4.0}},
        "factor in rotary parameters of type 'default' is not supported",
    ),
    *(
        (
            family,
            {"dual_chunk_attention_config": {"chunk_size": 48, "local_size": 8}},
            "changes nothing up to 40 tokens: in a copy, remove it and set max_position_embeddings",
        )
        for family in ("qwen2", "qwen3_moe")
    ),
    ("qwen2", {"rope_parameters": GONE}, "the field 'rope_theta' is missing"),
    *(
        (
            family,
            {"rope_parameters": GONE, "rope_theta": None},
            "the field 'rope_theta' is missing or null",
        )
        for family in ("llama", "qwen2")
    ),
    ("phi3", {"rope_parameters": {"rope_type": "yarn"}}, "RoPE scaling 'yarn' is not supported"),
    (
        "phi3",
        {"rope_parameters": {"partial_rotary_factor": 0.75}},
        "each head (partial_rotary_factor 0.75) is not",
    ),
    (
        "mistral",
        {"sliding_window": GONE, "max_position_embeddings": 4097},
        "the last 4096 of 4097 positions",
    ),
]
# changes that make no difference
HARMLESS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"partial_rotary_factor": 1.0, "hidden_act": "swish"}),
    (
        "qwen2",
        {"layer_types": ["full_attention"] * 4, "sliding_window": 8, "use_sliding_window": False},
    ),
    ("qwen2", {"attention_bias": True}),  # the biases that it has
    ("phi3", {"sliding_window": 64}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": GONE}),  # 4096 of 64 positions
    ("glm4_moe_air", {"n_group": 2, "topk_group": 2}),  # a token may choose from all
    ("glm4_moe_air", {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4}}),
]


def save_model(path: Path, family: str, seed: int = 0, **changed: int) -> Any:
    """Writes a random model of the family and returns it. Biases and norms are random too, so that
    errors show.

    Args:
        changed: fields of its config that are to have other values.
    """
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    config.update(changed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.3)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)  # as far apart as the scores
    model.save_pretrained(path)
    return model.eval()


def random_batch(seed: int, size: int = 6, vocab: int = 37, group: int = 2) -> Any:
    """A RolloutBatch of random prompts and responses with random rewards and advantages."""
    from megatron_stare.algorithms.advantage import group_advantages
    from megatron_stare.records.batch import Prompt
    from megatron_stare.records.rollout_batch import RolloutBatch
    from megatron_stare.records.trajectory import sampled_trajectory

    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for i in range(size):
        if i % group == 0:  # a group's responses are to one prompt
            prompt = Prompt(
                i // group,
                str(i // group),
                "",
                "",
                tuple(draw(2, vocab) for _ in range(3 + i // group)),
            )
        n = draw(1, 12)
        sample = sampled_trajectory(
            prompt, i % group, [draw(2, vocab) for _ in range(n)], [-1.0] * n
        )
        sample.reward, sample.reward_status = float(draw(0, 2)), "ok"
        samples.append(sample)
    samples[0].reward, samples[1].reward = 1.0, 0.0  # at least one group teaches something
    batch = RolloutBatch.from_trajectories(samples)
    batch.advantages = group_advantages(batch.rewards, batch.groups, batch.verified)
    batch.carries_loss = batch.baseline_mask = batch.verified
    batch.penalties = torch.zeros_like(batch.rewards)
    return batch
