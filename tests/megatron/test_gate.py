"""The gate of two data ranks whose tokens differ in entropy, exact and lagged: that of all tokens, on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step

from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.resolved import resolve_run

pytestmark = pytest.mark.distributed
SEED, SIZE, START = 1, 8, 1.2
LAGGED = {"surprisal": "rollout", "gate": "lagged"}


def config_of(path: Path, target: float, statistics: dict[str, str], data: int) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "parallel": {"data": data},
            "batch": {"prompts": SIZE // 2, "samples_per_prompt": 2, "micro_batch_tokens": 24},
            "statistics": statistics,
            "algorithm": {"name": "stare", "entropy_target": target, "adaptive": True, "amplify": START},
            "optimizer": {"name": "sgd", "lr": 0.1, "weight_decay": 0.0},
            "observability": {"entropy_forecast": False},
        }
    )


def one_step(rank: int, init: str, config: Config) -> dict[str, Any]:
    """What this rank reported, the state it holds for the next step, and the entropy of its own tokens."""
    trainer = Trainer(resolve_run(config), rank, init)
    metrics, _ = take_step(trainer, random_batch(SEED, SIZE))
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


@pytest.mark.parametrize("statistics", [{}, LAGGED], ids=["exact", "lagged"])
def test_both_data_ranks_have_the_gate_of_all_tokens(
    ranks: RankPool, tmp_path: Path, statistics: dict[str, str]
) -> None:
    save_model(tmp_path, "qwen2")
    (alone,) = ranks.run(one_step, 1, config_of(tmp_path, 9.0, statistics, data=1))
    whole = alone["own"]
    for own in [result["own"] for result in ranks.run(one_step, 2, config_of(tmp_path, 9.0, statistics, data=2))]:
        target = (whole + own) / 2  # the rank alone would find itself on the other side of it
        assert abs(target - whole) > 1e-2
        below = whole < target
        results = ranks.run(one_step, 2, config_of(tmp_path, target, statistics, data=2))
        for result in results:
            assert result["state"]["gate"] == float(below)
            assert result["state"]["amplify"] == pytest.approx(START + (0.01 if below else -0.01))
            before = {"gate": 1.0, "amplify": START, "attenuate": 0.9}
            assert result["used"] == (before if statistics else result["state"])
        (metrics,) = [result["metrics"] for result in results if result["metrics"] is not None]
        assert metrics["entropy/mean"] == pytest.approx(whole, rel=1e-5)
        assert metrics["stare/gate"] == result["used"]["gate"]
