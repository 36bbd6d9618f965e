"""Transformer Engine's layer spec, over a stub: every family's names, shapes, checkpoints and
exports. A stub computes nothing, so this says that weights come to the right places, not what the
layers make of them."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import FAMILIES, save_model
from support.ranks import RankPool
from support.runs import ROOT

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend.layout import join, leave
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.dry.planned_rank import plan_rank
from megatron_stare.megatron.export.export import export_hf
from megatron_stare.megatron.model.model import build_policy, load_hf, named_weights
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.models import read_shape
from megatron_stare.weights.files.convert import Options, convert
from megatron_stare.weights.files.hf_folder import HfFolder


def save_as_runs_do(rank: int, init: str, folder: Path) -> None:
    """A checkpoint of every family, of local layers."""
    for name in FAMILIES:
        path, target = folder / name, folder / f"{name}-run"
        shape, layout = read_shape(path), join(ParallelConfig(), rank, f"{init}-{name}", 1, 60)
        model = build_policy(shape, ModelConfig(path=str(path)), ParallelConfig(), layout, False)
        load_hf(model, HfFolder(path), shape, layout)
        optimizer, scheduler = build_optimizer(model, OptimizerConfig(), "float32", 1)
        target.mkdir()
        checkpoint.save(str(target), model, optimizer, scheduler, layout)
        leave()


def load_what_the_other_saved(rank: int, init: str, folder: Path) -> dict[str, dict]:
    """By family, what local layers export that resumed from what Transformer Engine's saved."""
    exported = {}
    for name in FAMILIES:
        path = folder / name
        shape, layout = read_shape(path), join(ParallelConfig(), rank, f"{init}-{name}", 1, 60)
        model = build_policy(shape, ModelConfig(path=str(path)), ParallelConfig(), layout, False)
        with torch.no_grad():
            for _, weight in named_weights(model):
                weight.zero_()
        checkpoint.load_weights(f"{path}-saved", model)
        exported[name] = export_hf(model, shape, layout)
        leave()
    return exported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def found(folder: Path, writers: RankPool) -> dict[str, dict[str, Any]]:
    for name in FAMILIES:
        save_model(folder / name, name)
        convert(folder / name, folder / f"{name}-megatron", None, Options())
    writers.run(save_as_runs_do, 1, folder)
    out = folder / "found"
    python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    stub, models = "support.transformer_engine_stub", "support.transformer_engine_models"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", stub, models, str(folder), str(out)],
        env=os.environ | {"PYTHONPATH": python_path},
        check=True,
    )
    return pickle.loads(out.read_bytes())


@pytest.mark.wide
@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_of_a_cut_layout_holds_its_part(found: dict, name: str) -> None:
    assert found[name]["faults"] == []


@pytest.mark.wide
def test_norms_are_fused_and_experts_grouped(found: dict) -> None:
    dense = {re.sub(r"\.\d+\.", ".N.", name) for name in found["qwen2"]["names"]}
    assert dense == {
        "embedding.word_embeddings.weight",
        "decoder.layers.N.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.N.self_attention.linear_qkv.weight",
        "decoder.layers.N.self_attention.linear_qkv.bias",
        "decoder.layers.N.self_attention.linear_proj.weight",
        "decoder.layers.N.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.N.mlp.linear_fc1.weight",
        "decoder.layers.N.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    experts = {name for name in found["qwen3_moe"]["names"] if ".3.mlp.experts." in name}
    assert experts == {
        f"decoder.layers.3.mlp.experts.linear_fc{part}.weight{number}"
        for part in (1, 2)
        for number in range(4)
    }
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in found["qwen3_moe"]["names"]


@pytest.mark.parametrize("name", FAMILIES)
def test_values_come_from_folders_and_checkpoints_and_go_out_again(
    found: dict, folder: Path, name: str
) -> None:
    hf = HfFolder(folder / name)
    want = {tensor: hf.slice(tensor)[:] for tensor in hf.names()}
    for way in ("loaded", "converted", "run"):
        got = found[name][way]
        assert got.keys() == want.keys()
        assert [tensor for tensor in want if not torch.equal(got[tensor], want[tensor])] == [], way
    convert(folder / f"{name}-saved", folder / f"{name}-back", folder / name, Options())
    back = HfFolder(folder / f"{name}-back")
    assert [tensor for tensor in want if not torch.equal(back.slice(tensor)[:], want[tensor])] == []


def test_local_layers_load_what_transformer_engines_saved(
    found: dict, folder: Path, writers: RankPool
) -> None:
    for name, exported in writers.run(load_what_the_other_saved, 1, folder)[0].items():
        assert exported.keys() == found[name]["loaded"].keys()
        assert all(
            torch.equal(exported[tensor], value) for tensor, value in found[name]["loaded"].items()
        ), name


@pytest.mark.parametrize("name", FAMILIES)
def test_both_specs_save_the_same_tensors(found: dict, folder: Path, name: str) -> None:
    """But for the norm before experts, which the local spec saves under the name that it has where
    there are none, and norms of latent attention and of what follows it, which it saves under the
    names that they have unfused."""
    shape = read_shape(folder / name)
    local = plan_rank(shape, ModelConfig(path="."), ParallelConfig(), OptimizerConfig(), 0).state
    keys = {part.key for part in local if part.dtype}
    if shape.latent:
        for layer in range(shape.layers):
            fused = {
                "self_attention.q_layernorm.weight": (
                    "self_attention.linear_q_up_proj.layer_norm_weight"
                ),
                "self_attention.kv_layernorm.weight": (
                    "self_attention.linear_kv_up_proj.layer_norm_weight"
                ),
            }
            if layer < shape.dense_layers:
                fused["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
            keys -= {f"decoder.layers.{layer}.{own}" for own in fused}
            keys |= {f"decoder.layers.{layer}.{other}" for other in fused.values()}
    elif shape.experts:
        # named one by one where layers are not alike
        routed = (
            [f"{layer}." for layer in range(shape.dense_layers, shape.layers)]
            if shape.dense_layers
            else [""]
        )
        keys -= {f"decoder.layers.{layer}mlp.linear_fc1.layer_norm_weight" for layer in routed}
        keys |= {f"decoder.layers.{layer}pre_mlp_layernorm.weight" for layer in routed}
    assert keys == found[name]["tensors"].keys()
    # more modules have extra states
    assert {part.key for part in local if not part.dtype} < found[name]["objects"]
