"""The Hugging Face folder that the ranks write holds, tensor for tensor, what one process would
have written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.models import save_model
from support.ranks import RankPool
from torch import Tensor

from megatron_stare.cluster.inline import InlineWorkers
from megatron_stare.cluster.trainer_group import TrainerGroup, plan_rules
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.checkpoints import export_policy
from megatron_stare.megatron.model.model import named_parameters
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import read_shape
from megatron_stare.weights.files.check import check_folder, expected
from megatron_stare.weights.files.hf_folder import create_shards, exported_step, locate

SHARD_BYTES = 20_000  # several files a rank


def config_of(path: Path, layout: dict[str, int]) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "parallel": layout,
            "algorithm": {"name": "grpo"},
            "optimizer": {"lr": 1e-2},
        }
    )


def changed(trainer: Trainer) -> None:
    """Other weights than those that were loaded, the same on data ranks."""
    with torch.no_grad():
        for _, parameter in named_parameters(trainer.policy.model):
            parameter.mul_(2)


def written(
    rank: int, init: str, config: Config, folder: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Exports the weights and writes them. Returned are the export and the names of tensors that
    this rank wrote."""
    trainer = Trainer(resolve_run(config), rank, init)
    changed(trainer)
    own = trainer.own_tensors()
    parts: list = [None] * config.parallel.world_size
    dist.all_gather_object(parts, {name: shape for name, (shape, _) in own.items()})
    entries = [
        create_shards(Path(folder), [p for p in parts if p], torch.float32, SHARD_BYTES)
        if rank == 0
        else None
    ]
    dist.broadcast_object_list(entries)
    trainer.write_tensors(entries[0])
    result = trainer.export(), list(own)
    trainer.close()
    return result


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout", "owners"),
    [
        ("qwen2_tied", {"tensor": 2, "pipeline": 2}, [0, 2]),
        ("qwen3", {"tensor": 2, "data": 2}, [0]),
        ("qwen3_moe", {"data": 2, "expert": 2, "pipeline": 2}, [0, 1, 2, 3]),
        ("qwen3_moe", {"tensor": 2, "expert": 2, "sequence": True}, [0]),
    ],
    ids=["tp2-pp2-tied", "tp2-dp2", "ep2-pp2", "tp2-ep2"],
)
def test_the_ranks_write_what_one_process_would(
    ranks: RankPool, tmp_path: Path, family: str, layout: dict, owners: list[int]
) -> None:
    save_model(tmp_path / "model", family)
    (tmp_path / "hf").mkdir()
    config = config_of(tmp_path / "model", layout)
    found = ranks.run(written, config.parallel.world_size, config, str(tmp_path / "hf"))
    want = found[0][0]
    names = [name for _, own in found for name in own]
    shape = read_shape(str(tmp_path / "model"))
    assert sorted(names) == sorted(want) == sorted(expected(shape))
    assert [rank for rank, (_, own) in enumerate(found) if own] == owners
    check_folder(tmp_path / "hf", shape)
    where = locate(tmp_path / "hf")
    got = {name: tensor for file in set(where.values()) for name, tensor in load_file(file).items()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    for _, own in found:  # a file is one rank's alone
        files = {where[name] for name in own}
        assert not files & {where[name] for name in set(want) - set(own)}


def exported_twice(rank: int, init: str, config: Config, folder: str) -> dict[str, Tensor]:
    trainer = Trainer(resolve_run(config), rank, init)
    group = TrainerGroup(InlineWorkers([trainer]), plan_rules(resolve_run(config)))
    source = Path(config.model.path)
    export_policy(group, Path(folder) / "hf", source, step=1)
    (Path(folder) / "hf/notes").touch()
    changed(trainer)
    export_policy(group, Path(folder) / "hf", source, step=2, shard_bytes=SHARD_BYTES)
    weights = trainer.export()
    group.close()
    return weights


@pytest.mark.distributed
def test_the_driver_lays_the_folder_out_and_replaces_the_former(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (want,) = ranks.run(exported_twice, 1, config_of(tmp_path / "model", {}), str(tmp_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["hf", "model"]
    assert not (tmp_path / "hf/notes").exists() and not (tmp_path / "hf/model.safetensors").exists()
    assert (tmp_path / "hf/config.json").read_text() == (tmp_path / "model/config.json").read_text()
    assert exported_step(tmp_path / "hf") == 2
    where = locate(tmp_path / "hf")
    assert len(set(where.values())) > 1
    got = {name: tensor for file in set(where.values()) for name, tensor in load_file(file).items()}
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert max(file.stat().st_size for file in set(where.values())) < 2 * SHARD_BYTES
