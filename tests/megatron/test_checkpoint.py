"""A step after loading a checkpoint is, bit for bit, the step that would have come without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.trainer import Trainer


def two_steps(
    rank: int, init: str, config: Config, folder: str, resumed: bool
) -> tuple[dict[str, Tensor], float]:
    """Step 1, save, step 2; or load what was saved and step 2. This rank's weights and the learning
    rate then."""
    trainer = Trainer(resolve_run(config), rank, init)
    if resumed:
        trainer.load(folder)
    else:
        take_step(trainer, random_batch(1, size=8))
        trainer.save(folder)
    take_step(trainer, random_batch(2, size=8))
    trainer.finish_save()  # what it writes is what was there when the save began
    result = trainer.export(), float(trainer.policy.optimizer.param_groups[0]["lr"])
    trainer.close()
    return result


def test_every_generator_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's, the GPU's, and Megatron's for tensor-parallel ranks; without a GPU the host's
    alone."""
    states = {"torch": torch.get_rng_state()}
    drawn = torch.rand(3)
    checkpoint._set_random_states(states)
    assert torch.equal(torch.rand(3), drawn)

    tracked, set_on_gpu = CudaRNGStatesTracker(), []
    tracked.states_ = {"model-parallel-rng": torch.tensor([5])}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_on_gpu.append)
    monkeypatch.setattr(checkpoint.tensor_parallel, "get_cuda_rng_tracker", lambda: tracked)
    saved = checkpoint._random_states()
    tracked.states_ = {}
    checkpoint._set_random_states(saved)
    assert set_on_gpu == [torch.tensor([7])]
    assert tracked.states_ == {"model-parallel-rng": torch.tensor([5])}

    checkpoint._set_random_states(states)  # of a run on a CPU: the GPU's stay those of the start
    assert torch.equal(torch.rand(3), drawn)
    assert len(set_on_gpu) == 1 and tracked.states_ == {"model-parallel-rng": torch.tensor([5])}


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_tied", {"tensor": 2}),
        ("qwen2_tied", {"data": 2}),
        ("qwen2_tied", {"tensor": 2, "pipeline": 2}),
        ("qwen3", {"tensor": 2, "pipeline": 2}),
        ("qwen2_tied", {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}),
    ],
    ids=["tp2", "dp2", "tp2-pp2", "tp2-pp2-untied", "pp2-vpp2", "ep2"],
)
def test_resumed_equals_uninterrupted(
    writers: RankPool, tmp_path: Path, family: str, layout: dict
) -> None:
    save_model(tmp_path / "model", family)
    (tmp_path / "checkpoint").mkdir()
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "parallel": layout,
            "batch": {"micro_batch_tokens": 48},
            "optimizer": {"lr": 1e-2, "warmup_steps": 4, "weight_decay": 0.1},
            "algorithm": {"name": "stare", "variant": "C2"},
        }
    )
    world = config.parallel.world_size
    straight = writers.run(two_steps, world, config, str(tmp_path / "checkpoint"), False)
    resumed = writers.run(two_steps, world, config, str(tmp_path / "checkpoint"), True)
    for (want, want_lr), (got, got_lr) in zip(straight, resumed, strict=True):
        assert got_lr == want_lr
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name
