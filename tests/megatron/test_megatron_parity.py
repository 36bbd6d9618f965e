"""Megatron's model against transformers: log-probs, entropies and gradients, whole and cut over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import FAMILIES, random_batch, save_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.batch import RolloutBatch
from megatron_stare.config.schema import ParallelConfig
from megatron_stare.megatron import layout as parallel_layout
from megatron_stare.megatron.cpu_backend import device
from megatron_stare.megatron.export import export_hf
from megatron_stare.megatron.microbatch import RankBatch
from megatron_stare.megatron.model import build_policy, load_hf
from megatron_stare.megatron.passes import Head, accumulate_gradients, score
from megatron_stare.megatron.trainer import main_grad
from megatron_stare.ops.plan import plan_micro_batches
from megatron_stare.weights.hf_folder import HfFolder
from megatron_stare.weights.shape import read_shape

TEMPERATURE = 0.8


def step_of(rank: int, init: str, path: str, parallel: ParallelConfig, budget: int) -> dict:
    """Scores a fixed batch and takes the gradient of its mean log-prob; whole tensors, by name."""
    shape = read_shape(path)
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    model = build_policy(shape, parallel, layout, "float32", distributed_optimizer=False)
    load_hf(model, HfFolder(path), shape, layout)
    batch = random_batch(3)
    plan = plan_micro_batches(batch.lengths.tolist(), layout.dp, budget)
    rank_batch = RankBatch(batch, plan, layout.dp_rank, device())
    head = Head(shape.vocab_size, TEMPERATURE, layout)
    log_prob, entropy = score(model, rank_batch, head)
    total = int(batch.response_lengths.sum())
    accumulate_gradients(model, rank_batch, head, lambda lp, micro: (lp.sum() / total, {"lp": lp.detach()}))
    result = {
        "index": rank_batch.index,
        "log_prob": log_prob,
        "entropy": entropy,
        "weights": export_hf(model, shape, layout),
        "gradients": export_hf(model, shape, layout, of=main_grad),
        "micro_batches": plan.micro_batches,
    }
    parallel_layout.leave()
    return result


def truth(path: Path, batch: RolloutBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same by transformers, one sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_probs, entropies, start = [], [], 0
    for prompt, response in zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True):
        tokens = batch.tokens[start : start + prompt + response]
        start += prompt + response
        log_p = (model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(1)
        log_probs.append(log_p.gather(1, tokens[prompt:, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(1))
    log_prob = torch.cat(log_probs)
    log_prob.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return log_prob.detach(), torch.cat(entropies).detach(), gradients


@pytest.mark.distributed
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("sizes", "budget"),
    [
        ({}, 10_000),
        ({}, 30),
        ({"tensor": 2}, 40),
        ({"tensor": 4}, 40),
        ({"data": 2}, 30),
        ({"tensor": 2, "data": 2}, 30),
    ],
    ids=["one", "one-small-micro-batches", "tp2", "tp4-shared-kv", "dp2", "tp2dp2"],
)
def test_equal_to_transformers(ranks, tmp_path: Path, family: str, sizes: dict, budget: int) -> None:
    parallel = ParallelConfig(**sizes)
    save_model(tmp_path, family)
    batch = random_batch(3)
    log_prob, entropy, gradients = truth(tmp_path, batch)
    results = ranks.run(step_of, parallel.world_size, str(tmp_path), parallel, budget)
    seen = torch.cat([r["index"] for r in results[:: parallel.tensor]]).sort().values
    assert torch.equal(seen, torch.arange(len(log_prob)))  # every token on exactly one data rank
    for result in results:
        torch.testing.assert_close(result["log_prob"], log_prob[result["index"]], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(result["entropy"], entropy[result["index"]], atol=2e-5, rtol=1e-5)
    exported = [r for r in results if r["weights"]]
    assert len(exported) == parallel.data
    originals = HfFolder(tmp_path)
    for result in exported:
        assert result["weights"].keys() == originals.names()
        for name, weight in result["weights"].items():
            assert torch.equal(weight, originals.slice(name)[:]), name
        for name, gradient in result["gradients"].items():
            scale = gradients[name].abs().max()
            assert (gradient - gradients[name]).abs().max() <= 1e-5 * scale + 1e-7, name
    assert (results[0]["micro_batches"] > 1) == (budget < 10_000)
