"""A closed trainer leaves nothing in its process: neither its model nor its process groups, whose
threads wake up a hundred times a second."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer

pytestmark = pytest.mark.distributed
RUNS = 4


def left_by_trainers(rank: int, init: str, config: Config) -> tuple[int, list[int]]:
    """Returns how many models of closed trainers still exist, and the threads after each run."""
    models, threads = [], []
    for run in range(RUNS):
        trainer = Trainer(resolve_run(config), rank, f"{init}-{run}")
        models += [weakref.ref(chunk) for chunk in trainer.policy.model]
        take_step(trainer, random_batch(5, 8))
        trainer.close()
        del trainer
        gc.collect()
        threads.append(len(os.listdir("/proc/self/task")))
    return sum(model() is not None for model in models), threads


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        (
            "qwen2",
            {
                "parallel": {"pipeline": 2},
                "algorithm": {"name": "grpo", "reference_kl": {"coef": 0.1}},
            },
        ),
        ("qwen3_moe", {"parallel": {"expert": 2, "data": 2}, "optimizer": {"distributed": True}}),
        ("deepseek_v3", {"batch": {"mini_batch_prompts": 2}}),
    ],
)
def test_a_closed_trainer_is_freed(
    ranks: RankPool, tmp_path: Path, family: str, sections: dict[str, Any]
) -> None:
    save_model(tmp_path / "model", family)
    tree: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model")},
        "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 64},
        "algorithm": {"name": "stare"},
        # its forward pass after the step would replace what the training pass left behind
        "observability": {"entropy_forecast": False},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if name == "batch" else section
    config = Config.model_validate(tree)
    for kept, threads in ranks.run(left_by_trainers, config.parallel.world_size, config):
        assert kept == 0
        # A thread of the group that was just closed may still be ending when it is counted, so two
        # counts stand for each half. One thread a run left behind makes the second half larger.
        assert min(threads[2:]) <= min(threads[:2])
