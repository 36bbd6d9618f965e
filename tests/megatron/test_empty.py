"""Mini-batches of which no token is kept: no optimizer step and no schedule step, in every
layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import equal, loss_scale_state, state_of, take_step

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.rollout_batch import RolloutBatch

pytestmark = pytest.mark.distributed


def config_of(path: Path, algorithm: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Adam with momentum, weight decay and warm-up: a step on a gradient of 0 would move the
    weights."""
    tree: dict[str, Any] = {
        "model": {"path": str(path)},
        "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 24},
        "algorithm": algorithm,
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 5},
        "observability": {"measured_every": 1},
    }
    return Config.model_validate(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )


def rejected(seed: int) -> RolloutBatch:
    """Batch of tokens that the engine found far less likely than any trainer does."""
    batch = random_batch(seed, 8)
    batch.rollout_log_probs = torch.full_like(batch.rollout_log_probs, -100.0)
    return batch


def around_an_empty_step(
    rank: int, init: str, config: Config
) -> tuple[bool, bool, bool, list[dict[str, float]]]:
    """Takes a full step, an empty one and a full one. Returned are whether each moved this rank's
    state, and what the empty one reported."""
    trainer = Trainer(resolve_run(config), rank, init)
    states = [[*state_of(trainer), *loss_scale_state(trainer)]]
    take_step(trainer, random_batch(8, 8))
    states.append([*state_of(trainer), *loss_scale_state(trainer)])
    metrics, _ = take_step(trainer, rejected(9))
    states.append([*state_of(trainer), *loss_scale_state(trainer)])
    take_step(trainer, random_batch(8, 8))
    states.append([*state_of(trainer), *loss_scale_state(trainer)])
    trainer.close()
    first, empty, last = (not equal(before, after) for before, after in itertools.pairwise(states))
    return first, empty, last, metrics


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_moves_in_16_bits(ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    """Nor does the loss scale, which would grow with the second step."""
    save_model(tmp_path, "qwen2_tied")
    optimizer = {"loss_scale_window": 2, "initial_loss_scale": 256.0}
    row = check_nothing_moves(
        ranks, tmp_path, "mask", False, model={"dtype": dtype}, optimizer=optimizer
    )
    assert row.get("optimizer/loss_scale") == (256.0 if dtype == "float16" else None)
    assert row.get("update/skipped", 0.0) == 0.0


@pytest.mark.parametrize("mode", ["mask", "icepop"])
@pytest.mark.parametrize("normalise", [True, False])
def test_nothing_moves(ranks: RankPool, tmp_path: Path, mode: str, normalise: bool) -> None:
    save_model(tmp_path, "qwen2_tied")
    check_nothing_moves(ranks, tmp_path, mode, normalise)


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "pipeline": 2}, {"pipeline": 2, "data": 2}, {"data": 2}],
    ids=["tp2-pp2", "pp2-dp2", "dp2"],
)
def test_all_ranks_leave_the_step_out_together(
    ranks: RankPool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    save_model(tmp_path, "qwen2_tied")
    check_nothing_moves(
        ranks, tmp_path, "mask", False, parallel=layout, optimizer={"distributed": "data" in layout}
    )


def test_experts_leave_the_step_out_too(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe")
    check_nothing_moves(ranks, tmp_path, "mask", False, parallel={"data": 2, "expert": 2})


def check_nothing_moves(
    ranks: RankPool, path: Path, mode: str, normalise: bool, **sections: dict[str, Any]
) -> dict[str, float]:
    """Gives what the empty step reported."""
    correction = {"mode": mode, "low": 1e-8, "high": 1e8, "normalise": normalise}
    config = config_of(path, {"name": "grpo", "correction": correction}, **sections)
    results = ranks.run(around_an_empty_step, config.parallel.world_size, config)
    for first, empty, last, _ in results:
        assert (first, empty, last) == (True, False, True)
    ((row,),) = [metrics for *_, metrics in results if metrics]
    assert (row["update/empty"], row["update/finite"], row["optimizer/grad_norm"]) == (
        1.0,
        1.0,
        0.0,
    )
    assert row["loss/policy"] == 0.0
    assert "forecast/measured_change" not in row  # of a step, and there was none
    return row


def test_a_reference_to_stay_near_is_something_to_learn(ranks: RankPool, tmp_path: Path) -> None:
    """Under icepop the tokens stay in the denominator, and their KL term acts: a step like any
    other."""
    save_model(tmp_path, "qwen2")
    correction = {"mode": "icepop", "low": 1e-8, "high": 1e8, "normalise": True}
    config = config_of(
        tmp_path, {"name": "grpo", "correction": correction, "reference_kl": {"coef": 0.1}}
    )
    ((_, moved, _, (row,)),) = ranks.run(around_an_empty_step, 1, config)
    assert moved
    assert row["update/empty"] == 0.0 and row["optimizer/grad_norm"] > 0


def a_batch_without_advantages(
    rank: int, init: str, config: Config
) -> tuple[bool, list[dict[str, float]]]:
    """Takes a full step and one without advantages. Returned are whether the latter moved this
    rank's state, and what it reported."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(8, 8))
    before, batch = state_of(trainer), random_batch(8, 8)
    batch.advantages = torch.zeros(8)
    metrics, _ = take_step(trainer, batch)
    moved = not equal(before, state_of(trainer))
    trainer.close()
    return moved, metrics


def test_a_gradient_of_zero_alone_is_not_an_empty_batch(ranks: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    config = config_of(tmp_path, {"name": "grpo"})
    ((moved, (row,)),) = ranks.run(a_batch_without_advantages, 1, config)
    assert moved
    assert row["update/empty"] == 0.0 and row["optimizer/grad_norm"] == 0.0


def updates_of(
    rank: int, init: str, config: Config, batch: RolloutBatch
) -> tuple[Any, list[dict[str, float]], int]:
    """A step's weights, metrics of every update, and steps of the schedule."""
    trainer = Trainer(resolve_run(config), rank, init)
    metrics, _ = take_step(trainer, batch)
    steps = trainer.policy.scheduler.num_steps
    result = trainer.export(), metrics, steps
    trainer.close()
    return result


def test_an_empty_mini_batch_among_others(ranks: RankPool, tmp_path: Path) -> None:
    """Two epochs of a mini-batch that teaches and one whose advantages are all 0: the weights, and
    what is reported, of two epochs of the first alone."""
    save_model(tmp_path, "qwen2")
    batch = random_batch(8, 8)
    assert batch.advantages is not None
    batch.advantages[4:] = 0.0
    algorithm = {
        "name": "twenty_entropy",
        "correction": {"low": 1e-8, "high": 1e8, "normalise": True},
    }
    several = config_of(tmp_path, algorithm, batch={"mini_batch_prompts": 2, "epochs": 2})
    alone = config_of(tmp_path, algorithm, batch={"prompts": 2, "epochs": 2})
    ((weights, metrics, steps),) = ranks.run(updates_of, 1, several, batch)
    ((want, rows, _),) = ranks.run(updates_of, 1, alone, batch.first(4))
    assert [row["update/empty"] for row in metrics] == [0.0, 1.0, 0.0, 1.0]
    assert steps == 2
    for name, weight in want.items():
        assert torch.equal(weights[name], weight), name
    for got, row in zip(metrics[::2], rows, strict=True):
        assert (
            got["loss/policy"] == row["loss/policy"] and got["optimizer/lr"] == row["optimizer/lr"]
        )
