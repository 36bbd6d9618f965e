"""Gradients that are reduced, and parameters that are gathered, while something else is computed:
the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.steps import take_step
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
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
from megatron_stare.megatron.export.export import export_gradients
from megatron_stare.megatron.model.head import Head
from megatron_stare.megatron.model.model import build_policy, load_hf
from megatron_stare.megatron.step.passes import accumulate_gradients
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import cost_of, read_shape
from megatron_stare.ops.linear_head import Mode
from megatron_stare.ops.plan import PlanRules, plan_micro_batches
from megatron_stare.weights.files.hf_folder import HfFolder

MODES: tuple[Mode, ...] = ("materialised", "gradient_in_forward", "recompute")
BUCKET = 3000  # parameters, so that a tiny model has several buckets


def gradients_of(
    rank: int, init: str, path: str, parallel: ParallelConfig, performance: PerformanceConfig
) -> dict[str, list[dict[str, Tensor]]]:
    """Gradients of every head on three batches, one after another: in the first Megatron's hooks
    only count."""
    shape = read_shape(path)
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=60)
    config = Config(model=ModelConfig(path=path), parallel=parallel, batch=BatchConfig(packed=True))
    found: dict[str, list[dict[str, Tensor]]] = {}
    for mode in MODES:
        model = build_policy(shape, config.model, parallel, layout, False, performance)
        load_hf(model, HfFolder(path), shape, layout)
        head = Head(shape.vocab_size, 1.0, layout, entropy_gradient=True, mode=mode, chunk=5)
        found[mode] = []
        for seed, budget in ((1, 40), (2, 30), (3, 60)):  # other numbers of micro-batches too
            batch = random_batch(seed, 10)
            rules = PlanRules(
                data_parallel=layout.dp,
                budget=budget,
                packed=True,
                multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
                cost=cost_of(shape),
            )
            plan = plan_micro_batches(batch.lengths.tolist(), rules)
            share = batch.share(plan.branches_of(layout.dp_rank))
            ranked = RankBatch(
                share, plan, layout.dp_rank, device(), sequence_layout(config, layout)
            )
            accumulate_gradients(
                model, ranked, head, lambda lp, ent, _: (lp.sum() + 0.3 * ent.sum(), {})
            )
            found[mode].append(export_gradients(model, shape, layout))
            for chunk in model:
                assert all(parameter.grad is None for parameter in chunk.parameters())
        if performance.overlap_grad_reduce and layout.pp_rank == 0:  # later stages have no buckets
            assert max(len(chunk.bucket_groups) for chunk in model) > 1
    parallel_layout.leave()
    return found


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2", {"data": 2}),
        ("qwen2_tied", {"data": 2}),
        # the last stage's copy of the embedding is no embedding
        ("qwen2_tied", {"pipeline": 2, "data": 2}),
        pytest.param(
            "qwen2", {"pipeline": 2, "virtual_pipeline": 2, "data": 2}, marks=pytest.mark.slow
        ),
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, marks=pytest.mark.slow),
    ],
    ids=["dp2", "dp2-tied", "pp2-dp2-tied", "vpp2-dp2", "ep2"],
)
def test_gradients_are_those_without_overlap(
    ranks, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    save_model(tmp_path, family)
    parallel = ParallelConfig(**layout)
    arguments = str(tmp_path), parallel
    plain = ranks.run(gradients_of, parallel.world_size, *arguments, PerformanceConfig())
    overlapped = PerformanceConfig(overlap_grad_reduce=True, gradient_bucket=BUCKET)
    for one, other in zip(
        plain, ranks.run(gradients_of, parallel.world_size, *arguments, overlapped), strict=True
    ):
        for mode in MODES:
            for before, after in zip(one[mode], other[mode], strict=True):
                assert before.keys() == after.keys()
                for name, gradient in before.items():
                    assert torch.equal(gradient, after[name]), (mode, name)


@pytest.mark.distributed
def test_fused_operations_compute_the_same(ranks, tmp_path: Path) -> None:
    """Uncompiled, as the tests run: what the compiler makes of them is for a GPU to show."""
    save_model(tmp_path, "qwen2")
    fused = PerformanceConfig(swiglu_fusion=True, bias_fusion=True)
    plain, found = (
        ranks.run(gradients_of, 1, str(tmp_path), ParallelConfig(), performance)[0]
        for performance in (PerformanceConfig(), fused)
    )
    for mode in MODES:
        for before, after in zip(plain[mode], found[mode], strict=True):
            for name, gradient in before.items():
                assert (after[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), (
                    mode,
                    name,
                )


def steps_of(rank: int, init: str, config: Config, folder: str) -> list[dict[str, Tensor]]:
    """The weights after each of three steps of two updates, as they are exported, streamed and
    saved."""
    trainer = Trainer(resolve_run(config), rank, init)
    found = []
    for seed in (1, 2, 3):
        take_step(trainer, random_batch(seed, 8))
        if seed == 1:
            found.append({name: tensor.clone() for name, tensor in trainer.export().items()})
        elif seed == 2:
            trainer.begin_weight_stream()
            buckets = [trainer.next_bucket() for _ in trainer.bucket_layouts()]
            trainer.end_weight_stream()
            found.append(
                {str(i): bucket.clone() for i, bucket in enumerate(buckets) if bucket is not None}
            )
        else:
            trainer.save(folder)
            trainer.finish_save()
            trainer.load(folder)
            found.append(trainer.export())
    trainer.close()
    return found


@pytest.mark.distributed
def test_parameters_are_those_without_overlap(writers, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2")
    found = []
    for overlap in (None, True):
        (tmp_path / str(overlap)).mkdir()
        config = Config.model_validate(
            {
                "run": {"steps": 3},
                "model": {
                    "path": str(tmp_path / "model"),
                    "head": "gradient_in_forward",
                    "head_chunk_tokens": 5,
                },
                "algorithm": {"name": "grpo"},
                "parallel": {"data": 2},
                "batch": {
                    "prompts": 4,
                    "samples_per_prompt": 2,
                    "mini_batch_prompts": 2,
                    "micro_batch_tokens": 30,
                },
                "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 12},
                # the norm, summed in another order where buckets are others, is not to scale
                # gradients
                "optimizer": {"lr": 1e-2, "distributed": True, "clip_grad": 1e9},
                "performance": {
                    "overlap_grad_reduce": overlap,
                    "overlap_param_gather": overlap,
                    "gradient_bucket": BUCKET if overlap else None,
                },
            }
        )
        found.append(writers.run(steps_of, 2, config, str(tmp_path / str(overlap)))[0])
    for before, after in zip(*found, strict=True):
        assert before.keys() == after.keys() and before
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
    assert not torch.equal(found[0][0]["lm_head.weight"], found[0][2]["lm_head.weight"])
