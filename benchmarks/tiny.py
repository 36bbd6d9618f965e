"""Inputs of the trainer's benchmarks: a small random model, and a batch of ragged responses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_stare.config.schema import ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.model.model import build_policy, load_hf
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.weights.files.hf_folder import HfFolder

GROUP = 8  # responses a prompt


def save_tiny(folder: str | Path, vocab: int, hidden: int, layers: int) -> None:
    """Writes a random Qwen2 as a Hugging Face folder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


@contextmanager
def tiny_policy(
    vocab: int, hidden: int, layers: int
) -> Iterator[tuple[list[nn.Module], ModelShape, Layout]]:
    """Such a model in Megatron, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(folder, vocab, hidden, layers)
        shape, parallel = read_shape(folder), ParallelConfig()
        layout = parallel_layout.join(parallel, 0, f"file://{folder}/ranks", seed=1, timeout_s=60)
        model = build_policy(
            shape, ModelConfig(path=folder), parallel, layout, distributed_optimizer=False
        )
        load_hf(model, HfFolder(folder), shape, layout)
        try:
            yield model, shape, layout
        finally:
            parallel_layout.leave()


def ragged_batch(
    samples: int, vocab: int, *, median: float, sigma: float, longest: int, prompt: int = 8
) -> RolloutBatch:
    """Random tokens in responses of log-normal lengths, as those of long chains of thought are;
    half are right.

    Args:
        median: response length, tokens.
        sigma: spread of the lengths' logarithm; 0: all of one length.
        prompt: tokens of every prompt.
    """
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(samples):
        length = int(median * torch.randn((), generator=generator).mul(sigma).exp())
        ids = torch.randint(2, vocab, (min(max(length, 2), longest),), generator=generator).tolist()
        log_probs = torch.empty(len(ids)).exponential_(2.0, generator=generator).neg().tolist()
        source = Prompt(i // GROUP, str(i // GROUP), "", "", tuple(range(2, 2 + prompt)))
        sample = sampled_trajectory(source, i % GROUP, ids, log_probs)
        sample.reward, sample.reward_status = float(i % 2), "ok"
        made.append(sample)
    return RolloutBatch.from_trajectories(made)
