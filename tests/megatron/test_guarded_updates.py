"""Updates that are not taken because of one rank's numbers: no rank takes them, and each says what
it found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import equal, log_prob_pass, state_of

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.guards import origin
from megatron_stare.megatron.model.model import named_parameters
from megatron_stare.megatron.step import step as step_module
from megatron_stare.megatron.step.not_finite import NotFinite
from megatron_stare.megatron.trainer import Trainer

pytestmark = pytest.mark.distributed
SIZE = 8
FAULTY = 3  # the rank: the second of data and of tensor


def begun(rank: int, init: str, config: Config) -> Trainer:
    """A rank before the update of a batch."""
    trainer = Trainer(resolve_run(config), rank, init)
    log_prob_pass(trainer, random_batch(2, SIZE))
    trainer.measure(trainer.method.initial_state())
    return trainer


def broken(
    rank: int, init: str, config: Config, fault: str
) -> tuple[dict[str, float] | None, NotFinite, bool, bool]:
    """An update in which one rank has a number that is not finite: what it reports, what is found
    here, whether anything moved, and whether an update after the fault is taken."""
    trainer = begun(rank, init, config)
    parameters = dict(named_parameters(trainer.policy.model))
    faulty = rank == FAULTY
    if fault == "weight" and faulty:
        parameters["decoder.layers.1.mlp.linear_fc2.weight"].data[0, 0] = torch.inf
    if fault == "gradient" and faulty:
        parameters["decoder.layers.2.mlp.linear_fc1.weight"].register_hook(
            lambda grad: grad * torch.nan
        )
    if fault == "loss" and faulty and trainer.step.measured is not None:
        whole = step_module.accumulate_gradients

        def lost(*args: Any) -> dict[str, torch.Tensor]:
            """The loss of a token is not finite, and none of the gradient: as of one that is
            clipped."""
            logged = whole(*args)
            logged["loss/policy"][0] = torch.inf
            return logged

        step_module.accumulate_gradients = lost
    before = state_of(trainer)
    try:
        result = trainer.update(0)
    finally:
        if fault == "loss" and faulty:
            step_module.accumulate_gradients = whole
    # NaN and inf do not compare
    unmoved = equal(state_of(trainer), before) or (fault == "weight" and faulty)
    found = trainer.not_finite()
    again = trainer.update(0) if fault == "loss" else None
    taken = fault != "loss" or not equal(state_of(trainer), before)
    trainer.close()
    assert again is None or again[0]["update/finite"] == 1.0
    return (result[0] if result else None), found, unmoved, taken


def limited(
    rank: int, init: str, config: Config, share: float
) -> tuple[dict[str, float] | None, float, bool]:
    """An update held to a share of its gradient norm: what it reports, that norm, and whether
    anything moved."""
    trainer = begun(rank, init, config)
    before = state_of(trainer)
    result = trainer.update(0, None, (), 0.0)  # nothing is below it, so this is a look at the norm
    assert equal(state_of(trainer), before)
    norms = [result[0]["optimizer/grad_norm"] if result else 0.0]
    torch.distributed.broadcast_object_list(norms, 0)
    result = trainer.update(0, None, (), norms[0] * share)
    moved = not equal(state_of(trainer), before)
    trainer.close()
    return (result[0] if result else None), norms[0], moved


def config_of(model: Path, **more: Any) -> Config:
    save_model(model, "qwen2")
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "parallel": {"tensor": 2, "data": 2},
            "batch": {"prompts": SIZE // 2, "samples_per_prompt": 2, "micro_batch_tokens": 30},
            "algorithm": {"name": "grpo"},
            "optimizer": {"lr": 1e-2, "distributed": True},
            "observability": {"entropy_forecast": False},
            **more,
        }
    )


def test_one_ranks_fault_is_left_out_by_all_and_found_where_it_was(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    said = {}
    for fault in ("weight", "gradient", "loss"):
        results = ranks.run(broken, 4, config, fault)
        ((reported,),) = ([row for row, *_ in results if row],)
        assert reported["update/finite"] == 0.0
        assert math.isfinite(reported["optimizer/grad_norm"]) == (fault == "loss")
        assert all(unmoved and taken for *_, unmoved, taken in results)
        said[fault] = origin([found for _, found, _, _ in results])
        own = [found.own_gradient for _, found, _, _ in results]
        # all hold it once it is reduced, and one says that it came from there
        if fault == "gradient":
            assert own == [False, False, False, True]
            assert sum(found.gradient is not None for _, found, _, _ in results) >= 2
        if fault == "loss":
            assert not any(own) and not any(found.gradient for _, found, _, _ in results)
    place = "rank 3 (data 1, tensor 1, stage 0)"
    assert said["weight"] == f"the weight decoder.layers.1.mlp.linear_fc2.weight on {place}"
    assert said["gradient"] == f"the gradient of decoder.layers.2.mlp.linear_fc1.weight on {place}"
    assert said["loss"].startswith("log-prob, advantage or loss of sample ") and said[
        "loss"
    ].endswith(place)


def test_all_ranks_hold_an_update_back_whose_norm_is_above_the_limit(
    ranks: RankPool, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    for share, held in ((0.999, True), (1.0, False)):
        results = ranks.run(limited, 4, config, share)
        assert [moved for *_, moved in results] == [not held] * 4
        ((row,),) = ([row for row, *_ in results if row],)
        assert row["update/held"] == float(held) and row["update/finite"] == 1.0
