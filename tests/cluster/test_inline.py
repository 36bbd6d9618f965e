"""A run in the caller's process: what a start that fails leaves there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.models import save_model

from megatron_stare.cluster.inline import InlineRunner
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError


def config_of(path: Path) -> Config:
    tree = {"model": {"path": str(path)}, "runtime": {"runner": "inline"}}
    return Config.model_validate(tree)


def fail(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def built_after_a_failure(rank: int, init: str, config: Config, where: str) -> list[float]:
    """Builds a trainer, which fails at this function, and builds another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"megatron_stare.megatron.{where}", fail)
        with pytest.raises(torch.OutOfMemoryError):
            InlineRunner(resolve_run(config))
    runner = InlineRunner(resolve_run(config))
    try:
        return [float(weights.sum()) for weights in runner.trainers.weights().values()]
    finally:
        runner.close()


@pytest.mark.distributed
@pytest.mark.parametrize("where", ["trainer.build_optimizer", "backend.layout.cut_world"])
def test_a_trainer_is_built_after_one_that_failed(ranks, tmp_path: Path, where: str) -> None:
    """In a notebook, the user lowers a setting and runs the cell again."""
    save_model(tmp_path, "qwen2_tied")
    (sums,) = ranks.run(built_after_a_failure, 1, config_of(tmp_path), where)
    assert len(sums) == 50


def refused_in_a_group(rank: int, init: str, config: Config) -> tuple[str, bool]:
    """Returns the refusal in a process of a group, and True if the group is still there."""
    dist.init_process_group("gloo", init_method=init, rank=0, world_size=1)
    try:
        with pytest.raises(UserError) as refused:
            InlineRunner(resolve_run(config))
        return str(refused.value), dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_a_process_group_of_the_users_program_is_left_alone(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    ((said, there),) = ranks.run(refused_in_a_group, 1, config_of(tmp_path))
    assert "this process belongs to a process group of torch.distributed already" in said
    assert there
