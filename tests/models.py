"""Tiny random Hugging Face models with the odd features that real ones have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

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
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}

FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama_tied_llama3": lambda: LlamaConfig(
        **{**SIZES, "num_key_value_heads": 1}, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "qwen2_yarn": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False, rope_parameters=YARN_ROPE),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2_tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen3_tied": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
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


def save_model(path: Path, family: str, seed: int = 0, **changed: int) -> Any:
    """Writes a random model of the family and returns it. Biases and norms are random too, so that errors show.

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
    model.save_pretrained(path)
    return model.eval()


def random_batch(seed: int, size: int = 6, vocab: int = 37, group: int = 2) -> Any:
    """A RolloutBatch of random prompts and responses with random rewards and advantages."""
    from megatron_stare.algorithms.advantage import group_advantages
    from megatron_stare.batch import Prompt
    from megatron_stare.records.rollout_batch import RolloutBatch
    from megatron_stare.records.trajectory import sampled_trajectory

    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for i in range(size):
        prompt = Prompt(i // group, str(i // group), "", "", tuple(draw(2, vocab) for _ in range(3 + i // group)))
        n = draw(1, 12)
        sample = sampled_trajectory(prompt, i % group, [draw(2, vocab) for _ in range(n)], [-1.0] * n)
        sample.reward, sample.reward_status = float(draw(0, 2)), "ok"
        samples.append(sample)
    samples[0].reward, samples[1].reward = 1.0, 0.0  # at least one group teaches something
    batch = RolloutBatch.from_trajectories(samples)
    batch.advantages = group_advantages(batch.rewards, batch.groups, batch.scored)
    batch.carries_loss, batch.penalties = batch.scored, torch.zeros_like(batch.rewards)
    return batch
