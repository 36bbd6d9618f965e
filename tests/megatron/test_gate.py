"""The gate of two ranks whose tokens differ in entropy, of other data or other chunks of the same
responses, exact and
lagged: that of all tokens, on both."""

from __future__ import annotations

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
SIZE, START = 8, 1.2
LAGGED = {"surprisal": "rollout", "gate": "lagged"}


def config_of(
    path: Path, target: float, statistics: dict[str, str], layout: dict[str, int]
) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "parallel": layout,
            "batch": {"prompts": SIZE // 2, "samples_per_prompt": 2, "micro_batch_tokens": 24},
            "statistics": statistics,
            "algorithm": {
                "name": "stare",
                "entropy_target": target,
                "adaptive": True,
                "amplify": START,
            },
            "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0},
            "observability": {"entropy_forecast": False},
        }
    )


def one_step(rank: int, init: str, config: Config, seed: int) -> dict[str, Any]:
    """Takes one step. Returned are this rank's report, its state for the next step, the state in
    use, and the entropy of its own tokens."""
    trainer = Trainer(resolve_run(config), rank, init)
    metrics, _ = take_step(trainer, random_batch(seed, SIZE))
    measured = trainer.step.measured
    assert measured is not None
    result = {
        "metrics": metrics[0] if metrics else None,
        "state": {name: float(x) for name, x in measured.next_state.items()},
        "used": {name: float(x) for name, x in measured.state.items()},
        "own": float(measured.tokens.entropy.double().mean()),
    }
    trainer.close()
    return result


@pytest.mark.wide
@pytest.mark.parametrize(
    ("statistics", "layout", "seed"),  # of a batch whose halves differ
    [({}, {"data": 2}, 1), (LAGGED, {"data": 2}, 1), ({}, {"context": 2}, 24)],
    ids=["exact", "lagged", "exact-cp2"],
)
def test_both_ranks_have_the_gate_of_all_tokens(
    ranks: RankPool, tmp_path: Path, statistics: dict[str, str], layout: dict[str, int], seed: int
) -> None:
    save_model(tmp_path, "qwen2")
    (alone,) = ranks.run(one_step, 1, config_of(tmp_path, 9.0, statistics, {}), seed)
    whole = alone["own"]
    parts = ranks.run(one_step, 2, config_of(tmp_path, 9.0, statistics, layout), seed)
    for own in [part["own"] for part in parts]:
        target = (whole + own) / 2  # the rank alone would find itself on the other side of it
        assert abs(target - whole) > 1e-2
        below = whole < target
        results = ranks.run(one_step, 2, config_of(tmp_path, target, statistics, layout), seed)
        for result in results:
            assert result["state"]["gate"] == float(below)
            assert result["state"]["amplify"] == pytest.approx(START + (0.01 if below else -0.01))
            before = {"gate": 1.0, "amplify": START, "attenuate": 0.9}
            assert result["used"] == (before if statistics else result["state"])
        (metrics,) = [result["metrics"] for result in results if result["metrics"] is not None]
        assert metrics["entropy/mean"] == pytest.approx(whole, rel=1e-5)
        assert metrics["stare/gate"] == result["used"]["gate"]
