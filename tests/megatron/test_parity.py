"""Megatron's model against transformers - log-probs, entropies, gradients, gradient norm - in every
layout.

The reference is plain transformers, one sample at a time, with autograd; so every layout is equal
to every other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.models import FAMILIES, MIXTURES, PARITY, random_batch, save_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from megatron_stare.config.schema import (
    BatchConfig,
    Config,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
)
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, device
from megatron_stare.megatron.batching.microbatch import RankBatch
from megatron_stare.megatron.batching.sequence_layout import sequence_layout
from megatron_stare.megatron.export.export import export_gradients, export_hf
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_policy, load_hf
from megatron_stare.megatron.model.routing_replay import install
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.megatron.step.passes import accumulate_gradients, compute_log_probs
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.linear_head import Mode
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.weights.files.hf_folder import HfFolder

TEMPERATURE = 0.8
SEED, SIZE = 3, 10
# rows of the chunked heads, so that micro-batches make several and a last one that is smaller
CHUNK = 5
MIX = 0.3  # entropy's share of the loss, so that the gradients of both outputs are seen


def step_of(
    rank: int,
    init: str,
    path: str,
    parallel: ParallelConfig,
    budget: int,
    packed: bool,
    distributed: bool,
    mode: Mode = "materialised",
    experts: Tensor | None = None,
    recompute: Mapping[str, Any] = MappingProxyType({}),
    share_prompts: bool = True,
) -> dict:
    """Scores a fixed batch and takes the gradient of a mix of its means; this rank's part of
    everything.

    Args:
        experts: [T, L, K] that the batch's tokens are sent to, whatever the routers find.
        recompute: of the section `model`.
        share_prompts: where experts are not given, which rules it out.
    """
    shape = read_shape(path)
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    settings = ModelConfig(path=path, **recompute)
    model = build_policy(shape, settings, parallel, layout, distributed_optimizer=distributed)
    load_hf(model, HfFolder(path), shape, layout)
    optimizer, _ = build_optimizer(
        model, OptimizerConfig(distributed=distributed), "float32", steps=1
    )
    batch = random_batch(SEED, SIZE)
    if experts is not None:
        install(model)
        batch.experts = experts
    rules = PlanRules(
        data_parallel=layout.dp,
        budget=budget,
        packed=packed,
        multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        each=parallel.sequence_multiple,
        cost=cost_of(shape),
    )
    plan = plan_micro_batches(batch.lengths.tolist(), rules)
    config = Config(
        model=ModelConfig(path=path),
        parallel=parallel,
        batch=BatchConfig(packed=packed),
        performance=PerformanceConfig(share_prompts=share_prompts),
        moe=MoeConfig(routing_replay=experts is not None),
    )
    share = batch.share(plan.branches_of(layout.dp_rank))
    rank_batch = RankBatch(share, plan, layout.dp_rank, device(), sequence_layout(config, layout))
    head = Head(
        shape.vocab_size, TEMPERATURE, layout, entropy_gradient=True, mode=mode, chunk=CHUNK
    )
    log_prob, entropy = compute_log_probs(model, rank_batch, head)
    total = int(batch.response_lengths.sum())
    logged = accumulate_gradients(
        model,
        rank_batch,
        head,
        lambda lp, ent, _: ((lp.sum() + MIX * ent.sum()) / total, {"lp": lp.detach()}),
    )
    gradients = export_gradients(model, shape, layout)
    with backend():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
    result = {
        "index": rank_batch.index if layout.last_stage else None,
        "log_prob": log_prob,
        "trained_log_prob": logged.get("lp"),
        "entropy": entropy,
        "weights": export_hf(model, shape, layout),
        "gradients": gradients,
        "norm": norm,
        "micro_batches": [len(r) for r in plan.ranks],
    }
    parallel_layout.leave()
    return result


def truth(path: Path, batch: RolloutBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The same by transformers, in float64: in float32 its own roundings are half of what we are
    allowed."""
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float64,
        experts_implementation="eager",  # grouped products know no float64
    )
    log_probs, entropies, start = [], [], 0
    for prompt, response in zip(
        batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True
    ):
        tokens = batch.tokens[start : start + prompt + response].long()
        if batch.experts is not None:
            force_experts(model, batch.experts[start : start + prompt + response])
        start += prompt + response
        log_p = (model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(1)
        log_probs.append(log_p.gather(1, tokens[prompt:, None]).squeeze(1))
        entropies.append(-(log_p.exp() * log_p).sum(1))
    log_prob = torch.cat(log_probs)
    (log_prob.mean() + MIX * torch.cat(entropies).mean()).backward()
    gradients = as_saved({name: p.grad.float() for name, p in model.named_parameters()})
    return log_prob.detach().float(), torch.cat(entropies).detach().float(), gradients


def force_experts(model: nn.Module, experts: Tensor) -> None:
    """Sends the tokens of the next sequence to the experts [t, L, K] in place of those that the
    routers find best, weighted by the routers' scores of them; 255: to the best."""

    def forced(gate: nn.Module, given: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(len(given), -1), gate.weight)
        bias = getattr(gate, "e_score_correction_bias", None)
        scores = logits.softmax(-1) if bias is None else logits.sigmoid()
        best = (scores if bias is None else scores + bias).topk(gate.top_k).indices
        chosen = torch.where(given == 255, best, given.long())
        weights = scores.gather(1, chosen) * getattr(gate, "routed_scaling_factor", 1)
        return (
            logits,
            weights / weights.sum(-1, keepdim=True) if gate.norm_topk_prob else weights,
            chosen,
        )

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = partial(forced, layer.mlp.gate, experts[:, number])


def as_saved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers fuses a layer's experts in memory, but not in its files."""
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for e, fused in enumerate(tensor):
                saved[f"{prefix}.{e}.gate_proj.weight"], saved[f"{prefix}.{e}.up_proj.weight"] = (
                    fused.chunk(2)
                )
        elif part == "down_proj":
            saved |= {f"{prefix}.{e}.down_proj.weight": expert for e, expert in enumerate(tensor)}
        else:
            saved[name] = tensor
    return saved


def merged(results: list[dict], key: str) -> dict[str, Tensor]:
    """Parts of all ranks by name; no name may come twice."""
    whole: dict[str, Tensor] = {}
    for result in results:
        assert not whole.keys() & result[key].keys()
        whole |= result[key]
    return whole


def check(
    ranks,
    path: Path,
    layout: dict,
    budget: int,
    packed: bool,
    distributed: bool = False,
    mode: Mode = "materialised",
    experts: Tensor | None = None,
    recompute: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict]:
    """Runs the step in this layout and holds everything against transformers."""
    parallel = ParallelConfig(**layout)
    batch = random_batch(SEED, SIZE)
    batch.experts = experts
    log_prob, entropy, gradients = truth(path, batch)
    given = (str(path), parallel, budget, packed, distributed, mode, experts, dict(recompute))
    results = ranks.run(step_of, parallel.world_size, *given)
    last = [r for r in results if r["index"] is not None]
    seen = torch.cat([r["index"] for r in last]).sort().values
    everyone = torch.arange(len(log_prob)).repeat_interleave(parallel.tensor)
    assert torch.equal(seen, everyone)  # every token on exactly one data rank
    for r in last:
        torch.testing.assert_close(r["log_prob"], log_prob[r["index"]], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(r["entropy"], entropy[r["index"]], atol=2e-5, rtol=1e-5)
        assert torch.equal(r["log_prob"], r["trained_log_prob"])  # on-policy ratios are exactly 1
    originals = HfFolder(path)
    weights = merged(results, "weights")
    assert weights.keys() == originals.names()
    for name, weight in weights.items():
        assert torch.equal(weight, originals.slice(name)[:]), name
    got = merged(results, "gradients")
    assert got.keys() == gradients.keys()
    for name, gradient in got.items():
        assert (gradient - gradients[name]).abs().max() <= 1e-5 * gradients[
            name
        ].abs().max() + 1e-7, name
    norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
    for r in results:
        assert r["norm"] == pytest.approx(float(norm), rel=1e-5)  # every parameter counted once
    return results


LAYOUTS = {
    "one": ({}, 10_000),
    "one-small-micro-batches": ({}, 30),
    "tp2": ({"tensor": 2}, 40),
    "tp4-shared-kv": ({"tensor": 4}, 40),
    "dp2": ({"data": 2}, 30),
    "dp4": ({"data": 4}, 24),
    "tp2-sp": ({"tensor": 2, "sequence": True}, 40),
    "pp2": ({"pipeline": 2}, 40),
    "pp2-uneven": ({"pipeline": 2, "first_stage_layers": 3}, 40),
    "pp2-vpp2": ({"pipeline": 2, "virtual_pipeline": 2}, 40),
    "tp2-pp2": ({"tensor": 2, "pipeline": 2}, 40),
    "tp2-dp2": ({"tensor": 2, "data": 2}, 30),
    "pp2-dp2": ({"pipeline": 2, "data": 2}, 30),
    "tp2-sp-pp2": ({"tensor": 2, "sequence": True, "pipeline": 2}, 40),
    "cp2": ({"context": 2}, 40),
    "cp4": ({"context": 4}, 48),
    "cp2-dp2": ({"context": 2, "data": 2}, 32),
    "cp2-tp2": ({"context": 2, "tensor": 2}, 40),
    "cp2-tp2-sp": ({"context": 2, "tensor": 2, "sequence": True}, 40),
    "cp2-pp2": ({"context": 2, "pipeline": 2}, 40),
    "cp2-pp2-vpp2": ({"context": 2, "pipeline": 2, "virtual_pipeline": 2}, 40),
}


EXPERTS = {
    "one": {},
    "ep2": {"data": 2, "expert": 2},
    # an expert's gradient has data ranks of its own to be reduced over
    "dp4-ep2": {"data": 4, "expert": 2},
    "pp2-ep2": {"pipeline": 2, "data": 2, "expert": 2},
    "tp2-sp-ep2": {"tensor": 2, "sequence": True, "data": 2, "expert": 2},
    "cp2-ep2": {"context": 2, "expert": 2},  # experts lie over the ranks of one sequence
    # an expert for each rank
    "tp2-sp-cp2-ep4": {"tensor": 2, "sequence": True, "context": 2, "expert": 4},
    "pp2-cp2-ep2": {"pipeline": 2, "context": 2, "expert": 2},
    "pp2-vpp2-cp2-ep2": {"pipeline": 2, "virtual_pipeline": 2, "context": 2, "expert": 2},
    "tp2-sp-pp2-cp2-ep2": {"tensor": 2, "sequence": True, "pipeline": 2, "context": 2, "expert": 2},
    "tp2-sp-cp2-dp2-ep4": {"tensor": 2, "sequence": True, "context": 2, "data": 2, "expert": 4},
}
SLOW = {"pp2-vpp2-cp2-ep2", "tp2-sp-pp2-cp2-ep2", "tp2-sp-cp2-dp2-ep4"}


def quick(layouts: Iterable[str], padded: set[str]) -> list[Any]:
    """Every layout packed and padded; padded is slow but for those named, as the batch is cut alike
    in all of them."""
    found = []
    for name in layouts:
        slow = (pytest.mark.slow,)
        found.append(
            pytest.param(name, False, marks=() if name in padded else slow, id=f"{name}-padded")
        )
        found.append(
            pytest.param(name, True, marks=slow if name in SLOW else (), id=f"{name}-packed")
        )
    return found


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "packed"), quick(LAYOUTS, {"one", "tp2", "dp2", "pp2-vpp2", "cp2", "cp2-tp2"})
)
def test_equal_to_transformers(ranks, tmp_path: Path, name: str, packed: bool) -> None:
    layout, budget = LAYOUTS[name]
    save_model(tmp_path, "qwen2_tied")
    results = check(ranks, tmp_path, layout, budget, packed)
    assert (results[0]["micro_batches"][0] > 1) == (budget < 10_000)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(("family", "name"), PARITY)
def test_other_families(ranks, tmp_path: Path, family: str, name: str) -> None:
    save_model(tmp_path, family)
    check(ranks, tmp_path, *LAYOUTS[name], packed=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["one", "tp2", "tp4-shared-kv", "pp2", "tp2-pp2"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(MIXTURES)))
def test_every_family_in_every_layout(ranks, tmp_path: Path, family: str, name: str) -> None:
    save_model(tmp_path, family)
    check(ranks, tmp_path, *LAYOUTS[name], packed=True)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("mode", ["gradient_in_forward", "recompute"])
@pytest.mark.parametrize(
    ("family", "name", "packed"),
    [
        ("qwen2_tied", "one", False),
        ("qwen2_tied", "tp2-sp", True),
        ("qwen2_tied", "tp2-sp-pp2", False),
        ("qwen3", "tp4-shared-kv", True),
        ("qwen3_tied", "pp2-vpp2", True),
        ("qwen2", "tp2-dp2", True),
    ],
)
def test_chunked_heads(
    ranks, tmp_path: Path, mode: Mode, family: str, name: str, packed: bool
) -> None:
    save_model(tmp_path, family)
    check(ranks, tmp_path, *LAYOUTS[name], packed=packed, mode=mode)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["dp2", "dp4", "tp2-dp2", "pp2-dp2", "cp2-dp2"])
def test_distributed_optimizer(ranks, tmp_path: Path, name: str) -> None:
    save_model(tmp_path, "qwen2_tied")
    check(ranks, tmp_path, *LAYOUTS[name], packed=True, distributed=True)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        "ep2",
        "dp4-ep2",
        "tp2-sp-ep2",
        "tp2-sp-cp2-ep4",
        pytest.param("tp2-sp-pp2-cp2-ep2", marks=pytest.mark.slow),
    ],
)
def test_distributed_optimizer_of_experts(ranks, tmp_path: Path, name: str) -> None:
    save_model(tmp_path, "qwen3_moe")
    check(ranks, tmp_path, EXPERTS[name], 30, packed=True, distributed=True)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("glm4_moe_air", "one"),
        ("glm4_moe", "one"),
        ("glm4_moe", "ep2"),
        ("glm4_moe", "pp2-ep2"),  # a stage with a dense layer and one without
        ("glm4_moe", "tp2-sp-ep2"),
        ("glm4_moe", "pp2-cp2-ep2"),
        ("deepseek_v3_short", "one"),
        ("deepseek_v3", "one"),
        ("deepseek_v3", "pp2-ep2"),
        ("deepseek_v3", "tp2-sp-ep2"),
        ("deepseek_v3", "pp2-cp2-ep2"),
        ("deepseek_v3_short", "tp2-sp-ep2"),
        *(
            pytest.param("deepseek_v3", name, marks=pytest.mark.slow)
            for name in sorted({*SLOW, "dp4-ep2", "cp2-ep2"})
        ),
        *(
            pytest.param("glm4_moe", name, marks=pytest.mark.slow)
            for name in sorted({*SLOW, "dp4-ep2", "cp2-ep2"})
        ),
        *(
            pytest.param("glm4_moe_air", name, marks=pytest.mark.slow)
            for name in EXPERTS
            if name != "one"
        ),
    ],
)
def test_mixtures_with_dense_layers(ranks, tmp_path: Path, family: str, name: str) -> None:
    save_model(tmp_path, family)
    check(ranks, tmp_path, EXPERTS[name], 40, packed=True)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "name"),
    [("glm4_moe", "tp2-sp-ep2"), ("deepseek_v3", "tp2-sp-ep2"), ("deepseek_v3", "cp2-ep2")],
)
def test_padded_and_with_the_distributed_optimizer(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    save_model(tmp_path, family)
    check(ranks, tmp_path, EXPERTS[name], 40, packed=False, distributed=True)


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "packed"), quick(EXPERTS, {"ep2"}))
def test_mixture_of_experts(ranks, tmp_path: Path, name: str, packed: bool) -> None:
    save_model(tmp_path, "qwen3_moe")
    check(ranks, tmp_path, EXPERTS[name], 40, packed)
