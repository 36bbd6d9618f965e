"""Experts that tensor-parallel ranks hold whole, each for its own tokens, learn from the tokens of
all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.export.export import gather_gradients
from megatron_stare.megatron.model.model import is_expert, named_parameters
from megatron_stare.megatron.trainer import Trainer


def step_of(
    rank: int, init: str, config: Config
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """A step's gradients of experts, by name; its gradient norm, and how likely the next batch was
    then."""
    trainer = Trainer(resolve_run(config), rank, init)
    first, _ = take_step(trainer, random_batch(1, size=8))
    # the distributed optimizer's ranks have reduced their own shards alone
    gather_gradients(trainer.policy.model)
    gradients = {
        name: p.main_grad.clone()
        for name, p in named_parameters(trainer.policy.model)
        if is_expert(name)
    }
    second, _ = take_step(trainer, random_batch(2, size=8))
    result = (
        gradients,
        [row["optimizer/grad_norm"] for row in first],
        [row["surprisal/mean"] for row in second],
    )
    trainer.close()
    return result


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "sequence": True},
        {"tensor": 2, "sequence": True, "expert": 2},
        pytest.param({"tensor": 2, "sequence": True, "data": 2}, marks=pytest.mark.slow),
        {"tensor": 2, "sequence": True, "context": 2, "expert": 2},
        pytest.param({"pipeline": 2, "context": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"tensor": 2, "sequence": True, "pipeline": 2, "context": 2, "expert": 4},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tp2", "tp2-ep2", "tp2-dp2", "tp2-cp2-ep2", "pp2-cp2-ep2", "tp2-pp2-cp2-ep4"],
)
@pytest.mark.parametrize(
    "distributed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "distributed"]
)
def test_replicas_of_an_expert_are_one(
    ranks: RankPool, tmp_path: Path, layout: dict[str, Any], distributed: bool
) -> None:
    save_model(tmp_path, "qwen3_moe")

    def config(parallel: dict[str, Any]) -> Config:
        # the bonus gives every response position a gradient, those of both ranks' halves of the
        # sequences
        optimizer = {"lr": 1e-3, "clip_grad": 1e9, "distributed": distributed}
        tree = {"model": {"path": str(tmp_path)}, "parallel": parallel, "optimizer": optimizer}
        return Config.model_validate(
            {**tree, "algorithm": {"name": "stare", "entropy_bonus": {"coef": 0.1}}}
        )

    ((wanted, norm, surprisal),) = ranks.run(step_of, 1, config({}))
    cut = config(layout)
    results = ranks.run(step_of, cut.parallel.world_size, cut)
    assert {name for held, *_ in results for name in held} == wanted.keys()
    for held, its_norm, its_surprisal in results:
        for name, gradient in held.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6, msg=name)
        assert its_norm == pytest.approx(norm, rel=1e-5) or not its_norm  # one rank reports
        assert its_surprisal == pytest.approx(surprisal, rel=1e-5) or not its_surprisal
    assert any(its_norm for _, its_norm, _ in results)
