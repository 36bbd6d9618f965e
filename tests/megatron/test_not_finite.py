"""An update whose gradient is not finite, on one data rank alone: no rank takes it, and nothing
remembers it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import log_prob_pass, take_step
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer

SIZE = 8


def two_steps(
    rank: int, init: str, config: Config, broken: str | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[dict[str, float]]]:
    """A step of two updates, then another whose first update is `broken` or not tried at all: this
    rank's weights after the first step and at the end, and the metrics of the second."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, SIZE))
    weights = {name: weight.clone() for name, weight in trainer.export().items()}
    batch = random_batch(2, SIZE)
    assert batch.advantages is not None
    log_prob_pass(trainer, batch)
    trainer.measure(trainer.method.initial_state())
    results = []
    if broken:
        measured = trainer.step.measured
        assert measured is not None
        hooks = []
        if broken == "loss":
            measured.tokens.advantage[measured.tokens.sequence == 0] = torch.nan
        elif rank == 0:  # a backward pass that overflows, of a loss that does not
            parameters = [p for chunk in trainer.policy.model for p in chunk.parameters()]
            hooks = [
                p.register_hook(lambda grad: torch.full_like(grad, torch.inf))
                for p in parameters[:1]
            ]
        results.append(trainer.update(0))
        for hook in hooks:
            hook.remove()
        for name, weight in trainer.export().items():
            assert torch.equal(weight, weights[name]), name
    results.append(trainer.update(1))
    final = trainer.export()
    trainer.close()
    return weights, final, [result[0] for result in results if result is not None]


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_it_is_left_out_by_all_ranks(ranks: RankPool, tmp_path: Path, what: str) -> None:
    save_model(tmp_path, "qwen2")
    config = Config.model_validate(
        {
            "run": {"steps": 2},
            "model": {"path": str(tmp_path)},
            "parallel": {"data": 2},
            "batch": {
                "prompts": SIZE // 2,
                "samples_per_prompt": 2,
                "mini_batch_prompts": SIZE // 4,
                "micro_batch_tokens": 30,
            },
            "algorithm": {"name": "grpo"},
            "optimizer": {"lr": 1e-2, "schedule": "linear"},
            "observability": {"entropy_forecast": False},
        }
    )
    straight, broken = (ranks.run(two_steps, 2, config, flag) for flag in (None, what))
    ((row,),) = [rows for *_, rows in straight if rows]
    ((lost, taken),) = [rows for *_, rows in broken if rows]
    assert lost["update/finite"] == 0.0 and math.isfinite(lost["loss/policy"]) == (
        what == "gradient"
    )
    assert (
        math.isnan(lost["optimizer/grad_norm"])
        if what == "loss"
        else not math.isfinite(lost["optimizer/grad_norm"])
    )
    assert taken == row  # with the rate of the third of four steps
    assert row["update/finite"] == 1.0 and row["optimizer/lr"] == pytest.approx(1e-2 / 4)
    for (_, want, _), (_, got, _) in zip(straight, broken, strict=True):
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name
            assert weight.isfinite().all()
    (before, after) = next((before, after) for before, after, _ in straight if before)
    assert any(not torch.equal(before[name], after[name]) for name in before)
