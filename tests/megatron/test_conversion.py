"""Converted checkpoints load through megatron.core in every layout; what any layout saved
converts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from support.models import FAMILIES, save_model
from support.ranks import RankPool
from torch import Tensor, nn

from megatron_stare.config.load import dump_yaml
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config, ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.backend.layout import Layout
from megatron_stare.megatron.export.export import export_hf
from megatron_stare.megatron.model.model import build_model, load_hf, unwrap
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.convert import Options, convert
from megatron_stare.weights.files.hf_folder import HfFolder


def empty_model(
    rank: int, init: str, path: str, parallel: ParallelConfig
) -> tuple[list[nn.Module], ModelShape, Layout]:
    shape = read_shape(path)
    layout = parallel_layout.join(parallel, rank, init, seed=1, timeout_s=600)
    return build_model(shape, ModelConfig(path=path), parallel, layout), shape, layout


def load_and_export(rank: int, init: str, path: str, parallel: ParallelConfig) -> dict[str, Tensor]:
    """Loads a checkpoint by megatron.core into a model that asks for all it has, and exports
    Hugging Face names."""
    model, shape, layout = empty_model(rank, init, path, parallel)
    with backend():
        wanted = {f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(model)}
        state = dist_checkpointing.load(wanted, path)
        for i, chunk in enumerate(model):
            unwrap(chunk).load_state_dict(state[f"model{i}"])
    tensors = export_hf(model, shape, layout)
    parallel_layout.leave()
    return tensors


LAYOUTS = {
    "one": {},
    "tp2": {"tensor": 2},
    "tp4-shared-kv": {"tensor": 4},
    "pp2": {"pipeline": 2},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "pp2-vpp2": {"pipeline": 2, "virtual_pipeline": 2},
}
# a layout that any family can be cut into
EVERYWHERE = {"tensor": 2, "sequence": True, "pipeline": 2}
CASES = [("qwen2_tied", name, layout) for name, layout in LAYOUTS.items()]
CASES += [
    ("qwen3", "tp2-pp2", LAYOUTS["tp2-pp2"]),
    ("qwen3_moe", "one", {}),
    ("qwen3_moe", "ep2", {"data": 2, "expert": 2}),
    ("qwen3_moe", "pp2-ep2", {"pipeline": 2, "data": 2, "expert": 2}),
    ("glm4_moe", "one", {}),
    ("deepseek_v3", "tp2-ep2", {"tensor": 2, "sequence": True, "expert": 2}),
    ("glm4_moe", "pp2-ep2", {"pipeline": 2, "data": 2, "expert": 2}),
]


SLOW = [
    pytest.param(family, EVERYWHERE, marks=pytest.mark.slow, id=f"{family}-everywhere")
    for family in FAMILIES
]


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout"), [*(pytest.param(*c[::2], id="-".join(c[:2])) for c in CASES), *SLOW]
)
def test_loads_in_every_layout(ranks: RankPool, tmp_path: Path, family: str, layout: dict) -> None:
    save_model(tmp_path / "hf", family)
    convert(tmp_path / "hf", tmp_path / "megatron", None, Options())
    parallel = ParallelConfig(**layout)
    results = ranks.run(load_and_export, parallel.world_size, str(tmp_path / "megatron"), parallel)
    assert_same_as_folder(
        {name: t for result in results for name, t in result.items()}, tmp_path / "hf"
    )


def assert_same_as_folder(tensors: dict[str, Tensor], path: Path) -> None:
    folder = HfFolder(path)
    assert tensors.keys() == folder.names()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, folder.slice(name)[:]), name


def save_run(rank: int, init: str, config: Config, folder: str) -> None:
    trainer = Trainer(resolve_run(config), rank, init)
    trainer.save(folder)
    trainer.finish_save()
    trainer.close()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen2_tied", {"tensor": 2, "pipeline": 2}, id="tp2-pp2"),
        pytest.param("qwen3", {"tensor": 4}, id="tp4-shared-kv"),
        pytest.param("qwen3_moe", {"data": 2, "expert": 2}, id="ep2"),
        pytest.param(
            "glm4_moe", {"pipeline": 2, "data": 2, "expert": 2}, id="dense-layers-pp2-ep2"
        ),
        pytest.param(
            "deepseek_v3", {"tensor": 2, "sequence": True, "expert": 2}, id="latents-tp2-ep2"
        ),
        pytest.param("deepseek_v3_short", EVERYWHERE, id="a-stage-without-experts"),
        *SLOW,
    ],
)
def test_a_run_converts(writers: RankPool, tmp_path: Path, family: str, layout: dict) -> None:
    save_model(tmp_path / "hf", family)
    config = Config.model_validate({"model": {"path": str(tmp_path / "hf")}, "parallel": layout})
    run = tmp_path / "run"
    (run / "checkpoints" / "step_000003").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_yaml(config))
    writers.run(
        save_run, config.parallel.world_size, config, str(run / "checkpoints" / "step_000003")
    )
    convert(run, tmp_path / "back", None, Options(check=True))
    written = HfFolder(tmp_path / "back")
    assert_same_as_folder(
        {name: written.slice(name)[:] for name in written.names()}, tmp_path / "hf"
    )


def save_by_layer(rank: int, init: str, path: str, parallel: ParallelConfig, folder: str) -> None:
    """A checkpoint as Megatron-LM writes it of layers that are not alike: the number of a layer is
    in its name."""
    model, shape, layout = empty_model(rank, init, path, parallel)
    load_hf(model, HfFolder(path), shape, layout)
    with backend():
        by_layer = {"non_homogeneous_layers": True, "dp_cp_group": layout.dp_group}
        dist_checkpointing.save(
            {"model": unwrap(model[0]).sharded_state_dict(metadata=by_layer)}, folder
        )
    parallel_layout.leave()


@pytest.mark.distributed
def test_layers_named_one_by_one(writers: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "qwen3_moe")
    saved = tmp_path / "lm" / "iter_0000007"
    saved.mkdir(parents=True)
    (tmp_path / "lm" / "latest_checkpointed_iteration.txt").write_text("7")
    parallel = ParallelConfig(data=2, expert=2)
    writers.run(save_by_layer, 2, str(tmp_path / "hf"), parallel, str(saved))
    convert(tmp_path / "lm", tmp_path / "back", tmp_path / "hf", Options(check=True))
    written = HfFolder(tmp_path / "back")
    assert_same_as_folder(
        {name: written.slice(name)[:] for name in written.names()}, tmp_path / "hf"
    )
