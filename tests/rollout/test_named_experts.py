"""The experts that an engine names reach the batch: of one turn, of two with something said in
between, and after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.check_again import CheckAgain
from safetensors.torch import load_file
from support.replicas import Replicas

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Generate, Response
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import DataError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.engine import GenerateResult
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.model_folder import load_tokenizer
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.rollout_source import Rollouts, check_trajectory

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
TOKENIZER = load_tokenizer(str(MODEL))
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=2, stop_token_ids=(1,))
CONFIG = Config.model_validate({"model": {"path": str(MODEL)}, "rollout": {"max_new_tokens": 24}})


class Naming(LocalEngine):
    """Stands for a server that names experts: of one layer, one a token, and it is the number of
    tokens it was fed."""

    def collect(self, wait_s: float) -> list[GenerateResult]:
        return [self._named(result) for result in super().collect(wait_s)]

    @staticmethod
    def _named(result: GenerateResult) -> GenerateResult:
        fed = result.prompt_tokens + len(result.output_ids) - 1
        return replace(result, experts=torch.full((fed, 1, 1), fed, dtype=torch.uint8))


class HasTheLastWord(Environment):
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, max_new_tokens=4))
        response.observed((5, 6, 7))
        return response.trajectory()


class Silent:
    judges_groups = False

    async def of(self, response: str, answer: str, *_: object) -> Verdict:
        await asyncio.sleep(0)
        return Verdict(0.0, "ok", answer_at=0)


@contextlib.asynccontextmanager
async def silent(answers: int) -> AsyncIterator[Silent]:
    yield Silent()


def made_by(environment: type[Environment]) -> tuple[Trajectory, list[int]]:
    """A trajectory, and the column of its batch."""
    engine = Naming(str(MODEL), 8)
    engine.begin_weight_update(5)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()
    rollouts = Rollouts(EnginePool(Replicas([engine])), environment(CONFIG, TOKENIZER), silent)
    prompt = Prompt(4, "4", "", "", tuple(TOKENIZER("12+34=").input_ids))
    (made,) = rollouts.make([prompt], 1, PARAMS)
    experts: Any = RolloutBatch.from_trajectories([made]).experts
    return made, experts.flatten().tolist()


@pytest.mark.parametrize(
    ("environment", "said_last"), [(SingleTurn, 0), (CheckAgain, 0), (HasTheLastWord, 3)]
)
def test_the_last_turn_names_all_before_it(environment: type[Environment], said_last: int) -> None:
    """The server was fed what was said in between with the second turn; what was said last it never
    saw."""
    made, column = made_by(environment)
    tokens = len(made.prompt.token_ids) + len(made)
    fed = tokens - 1 - said_last
    assert column == [fed] * fed + [255] * (1 + said_last)


def test_more_experts_than_tokens_are_an_environments_fault() -> None:
    made, column = made_by(SingleTurn)
    made.experts = torch.zeros(len(column) + 1, 1, 1, dtype=torch.uint8)
    with pytest.raises(DataError, match="names the experts of more"):
        check_trajectory(made, 24, 100)
