"""A random model, a random batch, and what the trainer and transformers make of them, on whatever
device there is."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from clock import now
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from megatron_stare.algorithms.advantage import group_advantages
from megatron_stare.config.schema import (
    BatchConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    PerformanceConfig,
)
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import device
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.export.export import export_gradients, export_hf
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_policy, load_hf
from megatron_stare.megatron.step.passes import accumulate_gradients, compute_log_probs
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.batch import Prompt
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.weights.files.hf_folder import HfFolder


@dataclass(frozen=True)
class Size:
    """Size of a model and a batch."""

    hidden: int
    layers: int
    vocab: int
    samples: int
    longest: int
    budget: int

    @classmethod
    def of(cls, cpu: bool) -> Size:
        return cls(32, 2, 37, 4, 12, 40) if cpu else cls(1024, 8, 32_000, 32, 512, 4096)


@contextlib.contextmanager
def model_folder(size: Size) -> Iterator[str]:
    """A random Qwen2 model's folder for as long as the context is open."""
    torch.manual_seed(0)
    heads = size.hidden // (64 if size.hidden >= 512 else 8)
    config = Qwen2Config(
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 3 // 2,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2 * size.longest + 16,
        vocab_size=size.vocab,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        yield folder


def random_batch(size: Size) -> RolloutBatch:
    """Random prompts and responses, two a prompt, of which one was right."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    samples = []
    for i in range(size.samples):
        if i % 2 == 0:
            prompt = Prompt(i // 2, str(i), "", "", tuple(draw(2, size.vocab, size.longest // 4)))
        (length,) = draw(size.longest // 2, size.longest, 1)
        sample = sampled_trajectory(prompt, i % 2, draw(2, size.vocab, length), [-1.0] * length)
        sample.reward, sample.reward_status = float(i % 2), "ok"
        samples.append(sample)
    batch = RolloutBatch.from_trajectories(samples)
    batch.advantages = group_advantages(batch.rewards, batch.groups, batch.verified)
    batch.carries_loss = batch.baseline_mask = batch.verified
    batch.penalties = torch.zeros_like(batch.rewards)
    return batch


@dataclass
class Passed:
    """Result of one forward and backward.

    [N] in canonical order, gradients by name (of the whole model on the first rank), the seconds of
    a second backward pass, and bytes of device memory at most (0 on a CPU).
    """

    index: Tensor
    log_prob: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    seconds: float
    peak: int


def trained(
    folder: str,
    size: Size,
    *,
    dtype: str = "float32",
    parallel: ParallelConfig | None = None,
    rank: int = 0,
    init: str | None = None,
    performance: PerformanceConfig | None = None,
    distributed: bool = False,
    repeats: int = 1,
    **model: Any,
) -> Passed:
    """The trainer's log-probs and the gradient of their mean."""
    parallel, performance = parallel or ParallelConfig(), performance or PerformanceConfig()
    settings = ModelConfig(path=folder, dtype=dtype, **model)  # type: ignore[arg-type]
    config = Config(
        model=settings, parallel=parallel, batch=BatchConfig(packed=True), performance=performance
    )
    shape = read_shape(folder)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as meeting:
        layout = parallel_layout.join(
            parallel, rank, init or f"file://{meeting}/ranks", seed=1, timeout_s=120
        )
        try:
            policy = build_policy(shape, settings, parallel, layout, distributed, performance)
            load_hf(policy, HfFolder(folder), shape, layout)
            batch = random_batch(size)
            rules = PlanRules(layout.dp, size.budget, packed=True, cost=cost_of(shape))
            plan = plan_micro_batches(batch.lengths.tolist(), rules)
            share = batch.share(plan.branches_of(layout.dp_rank))
            ranked = RankBatch(
                share, plan, layout.dp_rank, device(), sequence_layout(config, layout)
            )
            mode = "materialised" if settings.head == "auto" else settings.head
            head = Head(shape.vocab_size, 1.0, layout, mode=mode, chunk=max(size.budget // 8, 5))
            total = int(batch.response_lengths.sum())
            log_prob, _ = compute_log_probs(policy, ranked, head)
            seconds = []
            for _ in range(1 + repeats):
                start = now()
                accumulate_gradients(policy, ranked, head, lambda lp, *_: (lp.sum() / total, {}))
                seconds.append(now() - start)
            return Passed(
                ranked.index if layout.last_stage else ranked.index[:0],
                log_prob.cpu(),
                {
                    name: each.float().cpu()
                    for name, each in export_gradients(policy, shape, layout).items()
                },
                {name: each.cpu() for name, each in export_hf(policy, shape, layout).items()},
                min(seconds[1:]),
                torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            )
        finally:
            parallel_layout.leave()


def expected(folder: str, size: Size, dtype: str = "float32") -> tuple[Tensor, dict[str, Tensor]]:
    """The same of transformers, one sample at a time: log-probs [N] in canonical order, and
    gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device())
    batch, found, start = random_batch(size), [], 0
    total = int(batch.response_lengths.sum())
    for prompt, response in zip(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        tokens = batch.tokens[start : start + prompt + response].long().to(device())
        start += prompt + response
        log_p = model(tokens[None]).logits[0, prompt - 1 : -1].float().log_softmax(1)
        taken = log_p.gather(1, tokens[prompt:, None]).squeeze(1)
        (taken.sum() / total).backward()
        found.append(taken.detach().cpu())
    gradients = {
        name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None
    }
    return torch.cat(found), gradients


def gradient_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of an entry, relative to its tensor's largest entry. NaN where names
    differ."""
    if found.keys() != wanted.keys():
        return float("nan")
    errors = [(found[name] - each).abs().max() / each.abs().max() for name, each in wanted.items()]
    return float(torch.stack(errors).max())
