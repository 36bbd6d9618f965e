"""The live policy streamed out of Megatron in every layout: the folder it was loaded from, bit for
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import FAMILIES, save_model
from torch import Tensor

from megatron_stare.config.schema import ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.export.export import PolicyStream, export_hf
from megatron_stare.megatron.model.model import build_policy, load_hf, named_parameters
from megatron_stare.models import read_shape
from megatron_stare.weights.files.hf_folder import HfFolder
from megatron_stare.weights.sync.stream import tensor_checksum

BOUND = 8 * 2**10  # bytes a bucket


def run_through(
    policy: PolicyStream, buckets: int
) -> tuple[list[tuple[str, Tensor]], dict[str, str]]:
    """All tensors this rank was given, and the checksums."""
    policy.begin()
    named = []
    for layout in policy.layouts[:buckets]:
        flat = policy.next()
        named += layout.tensors(flat) if flat is not None else []
    return named, policy.end() if buckets >= len(policy.layouts) else {}


def stream_of(rank: int, init: str, path: str, parallel: ParallelConfig, dtype: str) -> dict:
    """Streams the policy as loaded, breaks a stream off, and streams it again with other
    weights."""
    shape, settings = read_shape(path), ModelConfig(path=path, dtype=dtype)
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=120)
    model = build_policy(shape, settings, parallel, layout, distributed_optimizer=False)
    load_hf(model, HfFolder(path), shape, layout)
    policy = PolicyStream(model, shape, layout, BOUND)
    loaded, checksums = run_through(policy, len(policy.layouts))
    run_through(policy, 3)
    with torch.no_grad():
        for _, parameter in named_parameters(model):
            parameter.mul_(2)
    doubled, _ = run_through(policy, len(policy.layouts))
    result = {
        "loaded": loaded,
        "checksums": checksums,
        "doubled": doubled,
        "exported": export_hf(model, shape, layout),
        "bytes": [layout.nbytes for layout in policy.layouts],
    }
    parallel_layout.leave()
    return result


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [
        ("qwen2_tied", {}, "float32"),
        ("qwen2_tied", {"tensor": 2}, "float32"),
        ("qwen3", {"tensor": 4}, "float32"),  # fewer query groups than ranks
        ("llama_tied_llama3", {"tensor": 2}, "bfloat16"),  # one query group
        ("qwen2_tied", {"pipeline": 2}, "float32"),
        ("qwen3_tied", {"data": 2}, "float32"),
        ("qwen2", {"tensor": 2, "pipeline": 2}, "float32"),
        ("qwen2_tied", {"tensor": 2, "pipeline": 2}, "bfloat16"),
        ("qwen2_tied", {"pipeline": 2, "virtual_pipeline": 2}, "float32"),
        ("qwen3_moe", {"data": 2, "expert": 2}, "float32"),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "data": 2, "expert": 2}, "bfloat16"),
        ("qwen3_moe", {"pipeline": 2, "data": 2, "expert": 2}, "float32"),
        ("glm4_moe", {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}, "bfloat16"),
        ("deepseek_v3", {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}, "float32"),
        *(
            pytest.param(
                family,
                {"tensor": 2, "sequence": True, "pipeline": 2},
                "float32",
                marks=pytest.mark.slow,
            )
            for family in FAMILIES
        ),
    ],
    ids=lambda x: (
        "-".join(f"{k[:2]}{int(v)}" for k, v in x.items()) or "one" if isinstance(x, dict) else x
    ),
)
def test_the_stream_is_the_folder(
    ranks, tmp_path: Path, family: str, layout: dict, dtype: str
) -> None:
    save_model(tmp_path, family)
    folder, parallel = HfFolder(tmp_path), ParallelConfig(**layout)
    sender, *others = ranks.run(stream_of, parallel.world_size, str(tmp_path), parallel, dtype)
    # no parameters
    biases = {name for name in folder.names() if name.endswith(".e_score_correction_bias")}
    want = {
        name: folder.slice(name)[:].to(torch.float32 if name in biases else getattr(torch, dtype))
        for name in folder.names()
    }
    for key, factor in (("loaded", 1), ("doubled", 2)):
        # each once, a tied embedding too
        assert sorted(name for name, _ in sender[key]) == sorted(want)
        for name, tensor in sender[key]:
            assert tensor.dtype == want[name].dtype
            assert torch.equal(tensor, want[name] * (1 if name in biases else factor)), name
    assert sender["checksums"] == {name: tensor_checksum(tensor) for name, tensor in want.items()}
    assert sender["exported"].keys() == want.keys()
    for name, tensor in sender["exported"].items():
        assert torch.equal(tensor, want[name] * (1 if name in biases else 2)), name
    # above the bound only where projections are fused
    largest = max(tensor.nbytes for tensor in want.values())
    assert len(sender["bytes"]) > 5 and max(sender["bytes"]) <= max(BOUND, largest)
    for rank in others:
        assert (
            rank["loaded"] == rank["doubled"] == [] and rank["exported"] == rank["checksums"] == {}
        )
