"""Faults that are planted in an engine which computes in bfloat16, held against a trainer that does
too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ranks import RankPool
from support.steps import log_prob_pass

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.agreement_watch import require_steady
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.observability.metrics.conditions import Window
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.log_prob_difference import LogProbDifference
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.rollout.agreement.agreement import AgreementError
from megatron_stare.rollout.agreement.limits import Limits
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.model_folder import load_tokenizer

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
PROMPTS, SAMPLES = 16, 8
LEARNING_RATE = 4.5e-4  # the quickstart's
CONFIG = Config.model_validate(
    {
        "model": {"path": str(MODEL), "dtype": "bfloat16"},
        "batch": {"prompts": PROMPTS, "samples_per_prompt": SAMPLES},
        "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 32},
        "algorithm": {"name": "grpo"},
    }
)
LIMITS = Limits.of(CONFIG)


def plant(engine: LocalEngine, fault: str) -> None:
    """Makes the engine compute otherwise than the weights that it was sent say."""
    model: Any = engine._model
    if fault == "positions":  # they are counted in steps of 1.5
        model.model.rotary_emb.inv_freq *= 1.5
    if fault == "stale layer":  # ten steps of Adam did not reach the output layer
        draw = torch.Generator().manual_seed(7)
        for parameter in model.lm_head.parameters():
            moved = torch.randint(2, parameter.shape, generator=draw) * 2 - 1
            parameter += (10 * LEARNING_RATE * moved).to(parameter.dtype)


def rollout(fault: str) -> RolloutBatch:
    """Samples a batch from an engine with the fault."""
    tokenizer, draw = load_tokenizer(str(MODEL)), random.Random(5)
    engine = LocalEngine(str(MODEL), dtype="bfloat16")
    engine.begin_weight_update(0)
    engine.update_weights(
        [(name, t.bfloat16()) for name, t in load_file(MODEL / "model.safetensors").items()]
    )
    engine.end_weight_update()
    plant(engine, fault)
    temperature = 0.7 if fault == "temperature" else 1.0
    params = SamplingParams(
        temperature, 32, seed=3, step=1, stop_token_ids=engine.model_info().stop_token_ids
    )
    texts = ["+".join(str(draw.randrange(100)) for _ in range(3)) + "=" for _ in range(PROMPTS)]
    prompts = [
        Prompt(n, str(n), text, "", tuple(tokenizer(text).input_ids))
        for n, text in enumerate(texts)
    ]
    requests = [
        GenerateRequest(f"{p.cursor}:{i}", p.token_ids, p.cursor, i)
        for p in prompts
        for i in range(SAMPLES)
    ]
    made = []
    for request, result in zip(requests, engine.generate(requests, params), strict=True):
        trajectory = sampled_trajectory(
            prompts[request.prompt_cursor],
            request.sample_index,
            result.output_ids,
            result.output_log_probs,
        )
        trajectory.reward = 0.0
        made.append(trajectory)
    return RolloutBatch.from_trajectories(made, 1)


def _compared(rank: int, init: str, faults: tuple[str, ...]) -> dict[str, LogProbDifference | None]:
    trainer = Trainer(resolve_run(CONFIG), rank, init)
    found = {}
    for fault in faults:
        log_prob_pass(trainer, trainer.method.judge(rollout(fault)))
        found[fault] = trainer.compare((0,))
    trainer.close()
    return found


FOUND: dict[str, LogProbDifference] = {}


@pytest.fixture
def compared(ranks: RankPool) -> dict[str, LogProbDifference]:
    if not FOUND:
        FOUND.update(*ranks.run(_compared, 1, ("", "positions", "stale layer", "temperature")))
    return FOUND


@pytest.mark.distributed
def test_an_undisturbed_engine_passes_with_room(compared: dict[str, LogProbDifference]) -> None:
    """And rounding is there: engine and trainer compute in another order."""
    found = compared[""]
    assert LIMITS.passed(found) == ""
    assert 1e-4 < found.everywhere.mean < LIMITS.bounds["mean"] / 5
    assert (
        found.quantiles["p99"] < LIMITS.bounds["p99"] / 3
        and found.quantiles["p999"] < LIMITS.bounds["p999"] / 5
    )


@pytest.mark.distributed
@pytest.mark.parametrize("fault", ["positions", "temperature"])
def test_a_gross_fault_is_caught_at_once(
    compared: dict[str, LogProbDifference], fault: str
) -> None:
    assert LIMITS.passed(compared[fault])


@pytest.mark.distributed
def test_a_layer_that_goes_stale_is_caught_by_the_trend(
    compared: dict[str, LogProbDifference],
) -> None:
    """Though each step by itself would pass."""
    assert LIMITS.passed(compared["stale layer"]) == ""
    right, stale = (compared[fault].everywhere.mean for fault in ("", "stale layer"))
    means = Window(CONFIG.agreement.window, first=CONFIG.agreement.window)

    def follow(mean: float) -> dict[str, float]:
        means.add(mean)
        growth = means.growth()
        return {"agreement/mean": mean} | ({} if growth is None else {"agreement/trend": growth})

    for mean in [right] * 2 * CONFIG.agreement.window:
        require_steady(follow(mean), LIMITS, "step")
    told = [follow(stale) for _ in range(CONFIG.agreement.window)]
    with pytest.raises(AgreementError, match="times as far apart"):
        require_steady(told[-1], LIMITS, "step")
