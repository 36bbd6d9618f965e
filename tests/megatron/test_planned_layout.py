"""Layouts built without data: a rank holds what a real one holds, and what is missing from a layout
is found."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import FAMILIES, save_model
from support.ranks import RankPool
from support.runs import ROOT
from torch import Tensor

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import backend, device
from megatron_stare.megatron.backend.layout import join, leave
from megatron_stare.megatron.dry.planned_layout import assumptions, extremes, faults, plan_layout
from megatron_stare.megatron.dry.planned_rank import RankPlan, pretend
from megatron_stare.megatron.model.model import build_policy, named_parameters
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape

BUCKET = 8 * 2**10


def shape_of(folder: Path, family: str) -> ModelShape:
    (folder / "config.json").write_text(FAMILIES[family]().to_json_string())
    return read_shape(folder)


def plan(
    shape: ModelShape, parallel: ParallelConfig, dtype: str = "float32", distributed: bool = True
) -> list[RankPlan]:
    model = ModelConfig(path=".", dtype=dtype)
    return plan_layout(shape, model, parallel, OptimizerConfig(distributed=distributed))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_tied", {"tensor": 2, "pipeline": 2, "data": 2}),
        ("llama_tied_llama3", {"tensor": 4, "data": 2}),  # ranks share a query group
        # every context rank holds all parameters
        ("qwen3", {"tensor": 2, "context": 2, "data": 2}),
        ("qwen3_tied", {"pipeline": 2, "virtual_pipeline": 2}),
        ("phi3", {"tensor": 2, "sequence": True, "pipeline": 3, "first_stage_layers": 2}),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "pipeline": 2, "data": 4, "expert": 4}),
        ("glm4_moe", {"tensor": 2, "sequence": True, "pipeline": 2, "data": 4, "expert": 4}),
        ("deepseek_v3", {"tensor": 2, "sequence": True, "pipeline": 2, "data": 2, "expert": 2}),
        ("glm4_moe_air", {"pipeline": 2, "virtual_pipeline": 2, "data": 2, "expert": 2}),
    ],
)
def test_all_ranks_hold_the_model_between_them(tmp_path: Path, family: str, layout: dict) -> None:
    shape, parallel = shape_of(tmp_path, family), ParallelConfig(**layout)
    plans = plan(shape, parallel)
    assert [p.rank for p in plans] == list(range(parallel.world_size))
    assert faults(plans, shape, parallel, BUCKET) == []
    assert not dist.is_initialized() and device().type == "cpu"


def bytes_of_a_real_rank(
    rank: int, init: str, shape: ModelShape, parallel: ParallelConfig, dtype: str, cut: bool
) -> dict:
    """Bytes that a rank with data holds after an optimizer step."""
    model = ModelConfig(path=".", dtype=dtype)
    chunks = build_policy(shape, model, parallel, join(parallel, rank, init, 1, 60), cut)
    optimizer, _ = build_optimizer(chunks, OptimizerConfig(distributed=cut), dtype, 1)
    with backend():
        optimizer.step()
    own = [parameter for chunk in chunks for parameter in chunk.parameters()]
    torchs = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    updated = [one for inner in torchs for group in inner.param_groups for one in group["params"]]
    moments = [
        x
        for inner in torchs
        for state in inner.state.values()
        for key, x in state.items()
        if key != "step"
    ]
    held = {
        "parameters": allocated(own),
        "gradients": allocated([parameter.main_grad for parameter in own]),
        "main parameters": sum(one.nbytes for one in updated) if dtype != "float32" else 0,
        "moments": sum(moment.nbytes for moment in moments),
    }
    leave()
    return held


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "dtype", "distributed"),
    [
        ("qwen2_tied", {"data": 2}, "bfloat16", True),
        ("qwen2", {"data": 2}, "float16", True),
        ("qwen2", {"tensor": 2}, "bfloat16", False),
        ("qwen3_moe", {"data": 2, "expert": 2}, "float32", True),
    ],
)
def test_bytes_are_those_of_a_real_rank(
    ranks: RankPool, tmp_path: Path, family: str, layout: dict, dtype: str, distributed: bool
) -> None:
    shape, parallel = shape_of(tmp_path, family), ParallelConfig(**layout)
    real = ranks.run(bytes_of_a_real_rank, parallel.world_size, shape, parallel, dtype, distributed)
    assert [planned.nbytes for planned in plan(shape, parallel, dtype, distributed)] == real


def allocated(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors, that they share counted once."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def changed(
    plans: list[RankPlan], rank: int, item: str, change: Callable[[list], list]
) -> list[RankPlan]:
    return [replace(p, **{item: change(getattr(p, item))}) if p.rank == rank else p for p in plans]


def test_whatever_is_missing_or_twice_is_found(tmp_path: Path) -> None:
    """One thing is changed on one of 8 ranks at a time."""
    shape = shape_of(tmp_path, "qwen3_moe")
    parallel = ParallelConfig(tensor=2, sequence=True, data=4, expert=4)
    plans = plan(shape, parallel)
    replica = "replica 1 makes model.layers.0.self_attn.q_proj.weight"

    def found(rank: int, item: str, change: Callable[[list], list]) -> str:
        return "\n".join(faults(changed(plans, rank, item, change), shape, parallel, BUCKET))

    def other_name(held: list) -> list:
        return [
            replace(h, hf=h.hf.replace("layers.0.self_attn.q_proj", "layers.7.self_attn.q_proj"))
            for h in held
        ]

    def other_part(held: list) -> list:
        return [replace(h, part=1 - h.part) if h.parts == 2 else h for h in held]

    def moved(state: list) -> list:
        return [
            replace(s, start=(s.start[0], 0, *s.start[2:])) if ".linear_fc2.weight" in s.key else s
            for s in state
        ]

    assert found(2, "held", list) == found(0, "state", list) == ""
    assert replica in found(2, "held", lambda held: [h for h in held if ".q_proj." not in h.hf])
    assert replica in found(
        2, "held", lambda held: [*held, *(h for h in held if ".q_proj." in h.hf)]
    )
    assert "layers.7.self_attn.q_proj.weight is none of the model's tensors" in found(
        2, "held", other_name
    )
    assert replica in found(2, "held", other_part)
    expert = "replica 0 makes model.layers.3.mlp.experts.1.down_proj.weight"
    assert expert in found(
        1, "held", lambda held: [h for h in held if "3.mlp.experts.1.down" not in h.hf]
    )
    assert "weight stream: no rank holds part" in "\n".join(
        faults(
            [replace(p, held=[h for h in p.held if h.part == 0]) for p in plans],
            shape,
            parallel,
            BUCKET,
        )
    )
    gap = "experts.linear_fc2.weight leave gaps or overlap"
    assert gap in found(
        0, "state", lambda state: [s for s in state if ".experts.linear_fc2.weight" not in s.key]
    )
    assert gap in found(1, "state", moved)
    assert "no rank writes" in found(
        0, "state", lambda state: [replace(s, main=False) for s in state]
    )
    assert "disagree" in found(
        3, "state", lambda state: [replace(s, dtype=torch.float16) for s in state]
    )
    assert "0 places for" in "\n".join(
        faults(
            [replace(p, state=[s for s in p.state if "router" not in s.key]) for p in plans],
            shape,
            parallel,
            BUCKET,
        )
    )
    assert "rank 5: some weight has data" in found(5, "with_data", lambda _: ["some weight"])


def test_a_rank_that_is_pretended_leaves_nothing_behind() -> None:
    before = (dist.new_group, torch.cuda.current_device, sys.excepthook)
    with pretend(ParallelConfig(tensor=4, pipeline=4, data=8), 77) as layout:
        assert (layout.tp_rank, layout.dp_rank, layout.pp_rank) == (1, 3, 2)
        assert layout.tp_group.size() == 4 and layout.dp_group.size() == 8
        assert device().type == "meta"
    assert (dist.new_group, torch.cuda.current_device, sys.excepthook) == before
    assert not dist.is_initialized() and device().type == "cpu"


@pytest.mark.parametrize("rank", [0, 5, 23])
def test_groups_are_of_the_layouts_sizes(rank: int) -> None:
    with pretend(ParallelConfig(tensor=2, context=2, pipeline=2, data=3), rank) as layout:
        groups = (layout.tp_group, layout.cp_group, layout.dp_group, layout.stage_group)
        assert [group.size() for group in groups] == [2, 2, 6, 12]


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_moe"])
def test_cut_parameters_say_along_which_dimension(tmp_path: Path, family: str) -> None:
    """Matrices that take a part of the input are cut in columns, others in rows; experts and norms
    are left out."""
    save_model(tmp_path, family)
    parallel, found = ParallelConfig(tensor=2), {}
    with pretend(parallel, 1) as layout:
        model = build_policy(
            read_shape(str(tmp_path)), ModelConfig(path=str(tmp_path)), parallel, layout, False
        )
        for name, parameter in named_parameters(model):
            if getattr(parameter, "tensor_model_parallel", False) and ".experts." not in name:
                found[re.sub(r"^decoder\.layers\.\d+\.", "", name)] = parameter.partition_dim  # type: ignore[attr-defined]
    assert found.pop("self_attention.linear_proj.weight") == 1
    assert found.pop("mlp.linear_fc2.weight", 1) == 1
    assert set(found.values()) == {0}
    assert found.keys() >= {"embedding.word_embeddings.weight", "self_attention.linear_qkv.weight"}


def test_every_rank_that_is_built_is_told_of(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    shape, model, told = read_shape(str(tmp_path)), ModelConfig(path=str(tmp_path)), []
    plan_layout(shape, model, ParallelConfig(data=3), OptimizerConfig(), advance=told.append)
    assert told == [1, 1, 1]


def test_what_a_plan_says_of_the_optimizer(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    shape, model = read_shape(str(tmp_path)), ModelConfig(path=str(tmp_path))

    def said(parallel: ParallelConfig, **settings: Any) -> str:
        return "\n".join(assumptions(shape, model, parallel, OptimizerConfig(**settings)))

    assert "Adam keeps two moments" in said(ParallelConfig(), name="adam")
    assert "the optimizer keeps no moments" in said(ParallelConfig(), name="sgd")
    assert "cut over 3 data-parallel replicas\n" in said(ParallelConfig(data=3), distributed=True)
    assert "every rank has all optimizer state" in said(ParallelConfig(data=3), distributed=False)


# architectures as published: their parameters and tensors; the layout; parameters of a rank's
# layers, of its embedding or head and of the last norm
PUBLISHED = [
    (
        "qwen2.5-32b",
        (32_763_876_352, 771),
        {"tensor": 8, "pipeline": 4, "data": 4},
        16 * (896 * 5120 + 896 + 640 * 5120 + 3 * 3456 * 5120 + 2 * 5120),
        19072 * 5120,
        5120,
    ),
    (
        "llama-3-70b",
        (70_553_706_496, 723),
        {"tensor": 8, "pipeline": 4, "data": 4},
        20 * (1280 * 8192 + 1024 * 8192 + 3 * 3584 * 8192 + 2 * 8192),
        16128 * 8192,
        8192,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "counts", "layout", "layers", "vocabulary", "norm"), PUBLISHED)
def test_128_ranks_of_a_dense_model(
    name: str, counts: tuple[int, int], layout: dict, layers: int, vocabulary: int, norm: int
) -> None:
    plans, parallel = of_128(name, layout | {"sequence": True})
    assert held_by_a_replica(plans) == counts
    for one in plans:
        own = layers + vocabulary * (one.pp_rank in (0, 3)) + norm * (one.pp_rank == 3)
        share = own // parallel.data
        assert one.nbytes == {
            "parameters": 2 * own,
            "gradients": 4 * own,
            "main parameters": 4 * share,
            "moments": 8 * share,
        }
    assert [found[0].pp_rank for found in extremes(plans).values()] == [3] * 5


@pytest.mark.slow
def test_128_ranks_of_a_mixture_of_experts() -> None:
    layout = {"tensor": 4, "sequence": True, "pipeline": 2, "data": 16, "expert": 8}
    plans, _ = of_128("qwen3-30b-a3b", layout)
    assert held_by_a_replica(plans) == (30_532_122_624, 18_867)
    experts = 24 * 16 * 3 * 768 * 2048
    attention = 24 * ((1024 + 256) * 2048 + 1024 * 2048 + 2 * 128 + 128 * 2048 + 2 * 2048)
    for one in plans:
        dense = attention + 38016 * 2048 + 2048 * (one.pp_rank == 1)
        assert one.nbytes["gradients"] == 4 * (dense + experts)
        assert one.nbytes["main parameters"] == 4 * (dense // 16 + experts // 8)


def of_128(name: str, layout: dict) -> tuple[list[RankPlan], ParallelConfig]:
    shape, parallel = read_shape(ROOT / "assets/architectures" / name), ParallelConfig(**layout)
    model = ModelConfig(path=".", dtype="bfloat16")
    plans = plan_layout(shape, model, parallel, OptimizerConfig(distributed=True), processes=2)
    assert len(plans) == parallel.world_size == 128
    assert faults(plans, shape, parallel, 512 * 2**20) == []
    return plans, parallel


def held_by_a_replica(plans: list[RankPlan]) -> tuple[int, int]:
    """Parameters and tensors, as the first holder of each part has them."""
    parts = {(h.hf, h.piece.number, h.part): h.piece.numel for p in reversed(plans) for h in p.held}
    return sum(parts.values()), len({name for name, _, _ in parts})
