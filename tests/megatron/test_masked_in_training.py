"""A training step reads nothing of what a batch stores at positions that carry no loss.

Such positions are an environment's tokens within a response, and all tokens of a response whose
verification failed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import save_model
from support.ranks import RankPool
from support.steps import take_step
from test_methods_in_training import batch_of, config_of
from torch import Tensor

from megatron_stare.algorithms import METHODS
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.rollout_batch import RolloutBatch

pytestmark = pytest.mark.distributed
# the weights are of a response, as methods of whole responses demand, and bounds let them pass
CORRECTION = {"mode": "mask", "level": "geometric", "low": 0.02, "high": 50.0}
OVER_LAYOUTS = ("gspo", "gtpo", "stare")
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"batch": {"packed": False}},
    "selects by the engine's log-probs": {"statistics": {"surprisal": "rollout"}},
    "data 2": {"parallel": {"data": 2}},
    "tensor 2, pipeline 2": {"parallel": {"tensor": 2, "pipeline": 2}},
}
Outcome = tuple[list[dict[str, float]], dict[str, float], dict[str, Tensor]]


def unread(batch: RolloutBatch) -> Tensor:
    """[N] bool: positions that carry no loss."""
    assert batch.carries_loss is not None
    return ~(batch.loss_mask & batch.carries_loss.repeat_interleave(batch.response_lengths))


def overwritten(batch: RolloutBatch, where: Tensor) -> RolloutBatch:
    """The batch with other engine log-probs at `where`, and other advantages for responses that
    lie wholly in it."""
    random = torch.Generator().manual_seed(5)
    log_probs, advantages = batch.rollout_log_probs, batch.advantages
    assert advantages is not None
    other = -9 * torch.rand(log_probs.shape, generator=random)
    whole = torch.stack([each.all() for each in where.split(batch.response_lengths.tolist())])
    drawn = 5 * torch.randn(advantages.shape, generator=random, dtype=advantages.dtype)
    return replace(
        batch,
        rollout_log_probs=torch.where(where, other, log_probs),
        advantages=torch.where(whole, drawn, advantages),
    )


def both(rank: int, init: str, config: Config, trained: bool) -> tuple[Outcome, Outcome]:
    """The updates of one batch, and of the batch with other values where it carries no loss; or,
    with `trained`, where it carries loss."""
    outcomes = []
    for number in range(2):
        trainer = Trainer(resolve_run(config), rank, f"{init}-{number}")
        batch = trainer.method.judge(batch_of(1))
        where = unread(batch)
        assert where.any() and not where.all()
        if number:
            batch = overwritten(batch, ~where if trained else where)
        metrics, state = take_step(trainer, batch)
        outcomes.append((metrics, state, trainer.export()))
        trainer.close()
    return outcomes[0], outcomes[1]


def outcomes(ranks: RankPool, config: Config, trained: bool = False) -> list[Any]:
    return ranks.run(both, config.parallel.world_size, config, trained)


def settings(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "correction": {"mode": "icepop"} if name == "dr_grpo" else CORRECTION,
    }


# every method packed; over the other layouts, one of each kind of coupling and selection
CASES = [
    pytest.param(
        name,
        layout,
        id=f"{name}, {layout}",
        marks=pytest.mark.wide if name == "stare" else pytest.mark.slow,
    )
    for name in METHODS
    for layout in LAYOUTS
    if layout == "packed" or name in OVER_LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_no_value_without_loss_is_read(
    ranks: RankPool, tmp_path: Path, name: str, layout: str
) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = config_of(tmp_path, settings(name), 1.0, **LAYOUTS[layout])
    for plain, other in outcomes(ranks, config):
        # loss, N, thresholds, gradient norm; a threshold of no tokens is NaN
        for found, want in zip(other[0], plain[0], strict=True):
            assert found == pytest.approx(want, rel=0, abs=0, nan_ok=True)
        assert other[1] == plain[1]  # the gate
        assert other[2].keys() == plain[2].keys()
        for key, weight in plain[2].items():
            assert torch.equal(other[2][key], weight), key


@pytest.mark.wide
def test_values_with_loss_are_read(ranks: RankPool, tmp_path: Path) -> None:
    # or the test above could not fail
    save_model(tmp_path, "qwen2_tied")
    ((plain, other),) = outcomes(ranks, config_of(tmp_path, settings("stare"), 1.0), trained=True)
    assert any(not torch.equal(other[2][key], weight) for key, weight in plain[2].items())
