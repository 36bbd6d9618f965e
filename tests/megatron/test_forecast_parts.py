"""The entropy forecast of the first of several mini-batches: of its own tokens that carry loss, and
of no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import save_model
from support.ranks import RankPool
from support.steps import log_prob_pass, plan_of
from test_methods_in_training import MINI_BATCH, batch_of, config_of

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer

STARE = {
    "name": "stare",
    "variant": "C2",
    "amplify": 3.0,
    "attenuate": 0.2,
    "share": 0.3,
    "entropy_target": None,
}


def first_update(rank: int, init: str, config: Config, alone: bool) -> dict[str, Any]:
    """Runs the first update. Returned are its report, this rank's tokens before it and the
    entropies after it.

    Args:
        alone: the first mini-batch is all there is.
    """
    trainer = Trainer(resolve_run(config), rank, init)
    batch = batch_of(1)
    if alone:
        batch = batch.first(int((batch.groups < MINI_BATCH).sum()))
    batch = trainer.method.judge(batch)
    plan = plan_of(config, batch)
    log_prob_pass(trainer, batch, plan)
    trainer.measure(trainer.method.initial_state())
    assert trainer.step.measured is not None
    before = trainer.step.measured.tokens
    result = trainer.update(0)
    log_prob_pass(trainer, batch, plan)
    after = trainer.step.measured.tokens.entropy
    trainer.close()
    return {"metrics": result[0] if result else None, "before": before, "after": after}


@pytest.mark.distributed
@pytest.mark.parametrize("data", [1, 2])
def test_a_mini_batch_is_forecast_and_measured_as_if_it_were_alone(
    ranks: RankPool, tmp_path: Path, data: int
) -> None:
    save_model(tmp_path, "qwen2")
    watched = {"entropy_forecast": True, "measured_every": 1}
    config = config_of(tmp_path, STARE, 0.3, observability=watched, parallel={"data": data})
    results = ranks.run(first_update, data, config, False)
    (alone,) = ranks.run(
        first_update, 1, config_of(tmp_path, STARE, 0.3, observability=watched), True
    )
    (metrics,) = [result["metrics"] for result in results if result["metrics"] is not None]
    wanted = {
        name: x
        for name, x in alone["metrics"].items()
        if name.startswith(("forecast/", "gradient/"))
    }
    assert len(wanted) == 63
    # those are of the whole rollout batch
    wanted = {name: x for name, x in wanted.items() if "token_" not in name}
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=2e-3, abs=1e-6)
    total, number = 0.0, 0
    for result in results:
        tokens, in_first = result["before"], batch_of(1).groups < MINI_BATCH
        counted = tokens.loss_mask & in_first[tokens.sequence]
        assert int(counted.sum()) < len(counted)
        total += float((result["after"] - tokens.entropy)[counted].double().sum())
        number += int(counted.sum())
    assert metrics["forecast/measured_change"] == pytest.approx(total / number, rel=1e-4)
    assert abs(total / number) > 1e-5
