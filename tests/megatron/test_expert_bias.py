"""Biases of experts stay what was loaded, to the bit and in float32, through training, checkpoints
and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step
from torch import Tensor

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerGroup, plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoints import export_policy
from megatron_stare.megatron.model.model import expert_biases
from megatron_stare.megatron.trainer import Trainer

BIAS = ".e_score_correction_bias"


def config_of(path: Path, dtype: str, layout: dict[str, Any]) -> Config:
    # the bonus gives every position a gradient
    algorithm = {"name": "stare", "entropy_bonus": {"coef": 0.1}}
    tree = {
        "model": {"path": str(path), "dtype": dtype},
        "parallel": layout,
        "algorithm": algorithm,
    }
    return Config.model_validate({**tree, "optimizer": {"lr": 1e-2, "warmup_steps": 0}})


def trained(
    rank: int, init: str, config: Config, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights after two steps, and those of a policy of other biases that was then loaded from
    a checkpoint."""
    run = resolve_run(config)
    trainer = Trainer(run, rank, init)
    for seed in (1, 2):
        take_step(trainer, random_batch(seed, size=8))
    trainer.save(folder)
    trainer.finish_save()
    after = trainer.export()
    for _, bias in expert_biases(trainer.policy.model):
        bias.zero_()
    trainer.load(folder)
    loaded = trainer.export()
    trainer.close()
    return after, loaded


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "layout", [{}, {"pipeline": 2, "data": 2, "expert": 2}], ids=["one", "pp2-ep2"]
)
def test_training_does_not_move_them(
    writers: RankPool, tmp_path: Path, dtype: str, layout: dict[str, Any]
) -> None:
    save_model(tmp_path / "model", "glm4_moe")
    (tmp_path / "checkpoint").mkdir()
    config = config_of(tmp_path / "model", dtype, layout)
    results = writers.run(trained, config.parallel.world_size, config, str(tmp_path / "checkpoint"))
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(name.endswith(BIAS) for name in before) == 3
    for weights in zip(*results, strict=True):  # after two steps; after a checkpoint
        held = {name: tensor for of_rank in weights for name, tensor in of_rank.items()}
        assert held.keys() == before.keys()
        for name, tensor in held.items():
            if name.endswith(BIAS):
                assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name
            else:
                assert tensor.dtype == getattr(torch, dtype)
        moved = [
            name
            for name, tensor in held.items()
            if not torch.equal(tensor, before[name].to(tensor.dtype))
        ]
        assert any(name.endswith(".mlp.gate.weight") for name in moved)


def exported(rank: int, init: str, config: Config, folder: str) -> None:
    trainer = Trainer(resolve_run(config), rank, init)
    group = TrainerGroup(InlineWorkers([trainer]), plan_rules(resolve_run(config)))
    export_policy(group, Path(folder), Path(config.model.path), step=1, shard_bytes=20_000)
    group.close()


@pytest.mark.distributed
def test_a_folder_of_bfloat16_holds_them_in_float32(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "glm4_moe_air")
    ranks.run(exported, 1, config_of(tmp_path / "model", "bfloat16", {}), str(tmp_path / "hf"))
    before = load_file(tmp_path / "model" / "model.safetensors")
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 1 and held.keys() == before.keys()
    for name, tensor in held.items():
        want = before[name] if name.endswith(BIAS) else before[name].bfloat16()
        assert tensor.dtype == want.dtype and torch.equal(tensor, want), name
    assert '"dtype": "bfloat16"' in (tmp_path / "hf" / "config.json").read_text()
