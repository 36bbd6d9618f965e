"""Ranks put together from one layer hold what whole ranks hold, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import FAMILIES
from support.runs import ROOT

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.dry.planned_rank import build_parts, plan_rank, stage_bytes
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape


def compare(
    shape: ModelShape, model: ModelConfig, parallel: ParallelConfig, optimizer: OptimizerConfig
) -> None:
    parts = build_parts(shape, model, parallel.tensor, parallel.expert)
    for stage in range(parallel.pipeline):
        rank = stage * parallel.world_size // parallel.pipeline
        whole = plan_rank(shape, model, parallel, optimizer, rank).nbytes
        assert stage_bytes(parts, shape, model, parallel, optimizer, stage) == whole


@pytest.mark.parametrize(
    ("family", "layout", "dtype", "distributed"),
    [
        ("qwen2_tied", {"tensor": 2, "pipeline": 2, "data": 3}, "bfloat16", True),
        ("qwen2_tied", {"data": 2}, "bfloat16", False),
        ("qwen3", {"tensor": 2, "context": 2, "data": 2}, "float32", True),
        ("qwen3_tied", {"pipeline": 2, "virtual_pipeline": 2}, "bfloat16", True),
        (
            "phi3",
            {"tensor": 2, "sequence": True, "pipeline": 3, "first_stage_layers": 2},
            "bfloat16",
            True,
        ),
        (
            "qwen3_moe",
            {"tensor": 2, "sequence": True, "pipeline": 2, "data": 4, "expert": 4},
            "bfloat16",
            True,
        ),
        ("qwen3_moe", {"data": 2}, "bfloat16", False),
        # experts among all other parameters
        ("qwen3_moe", {"data": 2, "pipeline": 2}, "bfloat16", True),
        (
            "glm4_moe",
            {"tensor": 2, "sequence": True, "pipeline": 2, "data": 4, "expert": 4},
            "bfloat16",
            True,
        ),
        ("glm4_moe", {"data": 3}, "bfloat16", True),
        ("glm4_moe_air", {"data": 2, "pipeline": 2, "virtual_pipeline": 2}, "bfloat16", True),
        (
            "glm4_moe_air",
            {"data": 2, "pipeline": 3, "first_stage_layers": 2, "expert": 2},
            "float32",
            True,
        ),
        (
            "deepseek_v3",
            {"tensor": 2, "sequence": True, "pipeline": 2, "data": 2, "expert": 2},
            "bfloat16",
            True,
        ),
        ("deepseek_v3_short", {"data": 2}, "bfloat16", True),
        # a dense one on each
        ("glm4_moe_air", {"data": 2, "pipeline": 2, "first_stage_layers": 1}, "bfloat16", True),
    ],
)
def test_tiny_models(
    tmp_path: Path, family: str, layout: dict, dtype: str, distributed: bool
) -> None:
    (tmp_path / "config.json").write_text(FAMILIES[family]().to_json_string())
    shape = read_shape(tmp_path)
    compare(
        shape,
        ModelConfig(path=".", dtype=dtype),
        ParallelConfig(**layout),
        OptimizerConfig(distributed=distributed),
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2.5-32b", {"tensor": 8, "sequence": True, "pipeline": 4, "data": 4}),
        ("qwen2.5-32b", {"tensor": 4, "sequence": True, "pipeline": 2, "context": 2, "data": 3}),
        ("llama-3-70b", {"tensor": 8, "sequence": True, "pipeline": 8, "data": 2}),
        ("qwen3-30b-a3b", {"tensor": 4, "sequence": True, "pipeline": 4, "data": 8, "expert": 32}),
        (
            "deepseek-v3",
            {
                "tensor": 8,
                "sequence": True,
                "pipeline": 2,
                "first_stage_layers": 31,
                "data": 8,
                "expert": 64,
            },
        ),
        ("glm-4.5-air", {"tensor": 4, "sequence": True, "pipeline": 2, "data": 8, "expert": 32}),
    ],
)
def test_published_sizes(name: str, layout: dict) -> None:
    shape = read_shape(ROOT / "assets/architectures" / name)
    compare(
        shape,
        ModelConfig(path=".", dtype="bfloat16"),
        ParallelConfig(**layout),
        OptimizerConfig(distributed=True),
    )
