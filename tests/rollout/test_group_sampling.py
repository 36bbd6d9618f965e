"""Dynamic sampling: which groups a step takes hangs on the samples alone, and every prompt is used
exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.replicas import TOKENIZER, Numbered, Replicas

from megatron_stare.config.schema import BatchConfig, Config
from megatron_stare.data.arithmetic import ArithmeticPrompts
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult, ModelInfo
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.group_sampling import EveryGroup, InformativeGroups
from megatron_stare.rollout.sources.make_source import make_groups
from megatron_stare.rollout.sources.rollout_source import Collected, Rollouts

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
STOP = 1
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=2, stop_token_ids=(STOP,))
CONFIG = Config.model_validate(
    {
        "model": {"path": str(MODEL)},
        "rollout": {"max_new_tokens": 24},
        "data": {"source": "arithmetic"},
    }
)


class Script(Workers):
    """Servers that hold any number of requests, answer in an order drawn from a seed, and can be
    told to forget.

    A response is `length(cursor)` tokens, of which the first is the sample's number: its text is
    its reward's key.
    """

    def __init__(self, engines: int, seed: int, length: Any = lambda cursor: 3) -> None:
        self.pending: list[list[GenerateRequest]] = [[] for _ in range(engines)]
        self.answered, self.forgotten = 0, 0
        self._order, self._length = random.Random(seed), length
        self._at: dict[str, int] = {}  # calls until a request is answered

    def __len__(self) -> int:
        return len(self.pending)

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        mine = self.pending[worker]
        if method == "bring_up":
            return ModelInfo(5, EngineState.HEALTHY, 99, 99, (STOP,), capacity=16)
        if method == "abort":
            self.forgotten += len(mine)
            mine.clear()
            return None
        assert method == "advance"
        mine += args[0]
        for request in args[0]:
            self._at[request.rid] = self._order.randrange(1, 4) * self._length(
                request.prompt_cursor
            )
        for request in mine:
            self._at[request.rid] -= 1
        done = [request for request in mine if self._at[request.rid] <= 0]
        mine[:] = [request for request in mine if self._at[request.rid] > 0]
        self.answered += len(done)
        return [self._answer(request) for request in done]

    def _answer(self, request: GenerateRequest) -> GenerateResult:
        n = self._length(request.prompt_cursor)
        ids = torch.full((n,), 3 + request.sample_index, dtype=torch.int32)
        ids[-1] = STOP
        return GenerateResult(
            request.rid, ids, torch.zeros(n), ((5, n),), "stop", 4, str(request.sample_index)
        )

    def wait(self, handles: Any, on_done: Any = None) -> list[Any]:
        return list(handles)

    async def result(self, handle: Any) -> Any:
        for _ in range(1 + self._order.randrange(20)):
            await asyncio.sleep(0)
        return handle

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


def rewarded(rewards: dict[int, list[float | None]], order: random.Random) -> Any:
    """Judges by cursor and sample; a reward of None is a verifier that crashed. Verdicts come in
    any order."""

    class Judge:
        judges_groups = False

        async def of(self, response: str, answer: str, *_: object) -> Verdict:
            for _ in range(order.randrange(30)):
                await asyncio.sleep(0)
            reward = rewards[int(answer)][int(response)]
            return Verdict(reward, "crash" if reward is None else "ok")

    @contextlib.asynccontextmanager
    async def verify(answers: int):
        yield Judge()

    return verify


def rollouts(workers: Workers, rewards: dict[int, list[float | None]], seed: int = 0) -> Rollouts:
    return Rollouts(
        EnginePool(workers), SingleTurn(CONFIG, TOKENIZER), rewarded(rewards, random.Random(seed))
    )


def collected(groups: Any, made: Rollouts, params: SamplingParams) -> Collected:
    """A step's trajectories."""
    return asyncio.run(groups.collect(made, params, lambda *_: None, lambda: None))


def drawn(seed: int, prompts: int) -> dict[int, list[float | None]]:
    """Half of the groups are of one reward; some have answers that could not be verified."""
    order = random.Random(seed)
    found: dict[int, list[float | None]] = {}
    for cursor in range(prompts):
        rewards: list[float | None] = (
            [float(order.random() < 0.5)] * 3
            if order.random() < 0.5
            else [1.0, 0.0, float(order.random() < 0.5)]
        )
        if order.random() < 0.2:
            rewards[order.randrange(3)] = None
        found[cursor] = rewards
    return found


def differ(rewards: list[float | None]) -> bool:
    return len({reward for reward in rewards if reward is not None}) == 2


def cursors(step: Collected) -> list[int]:
    """Cursors of a step's groups; every group must be whole and in order."""
    keys = [(t.prompt.cursor, t.sample_index) for t in step.trajectories]
    assert keys == sorted(keys) and len(set(keys)) == len(keys)
    found = sorted({cursor for cursor, _ in keys})
    assert len(keys) == 3 * len(found)
    return found


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_the_first_informative_groups_whatever_finishes_first(engines: int, seed: int) -> None:
    rewards = drawn(seed, 200)
    informative = [cursor for cursor in range(200) if differ(rewards[cursor])]
    workers = Script(engines, seed, length=lambda cursor: 2 + (7 * cursor) % 9)
    made = rollouts(workers, rewards, seed)
    queue = PromptQueue(Numbered())
    groups = InformativeGroups(queue, 4, 3, per_round=7, most_rounds=20)
    for step in range(5):
        found = collected(groups, made, PARAMS)
        here, said = cursors(found), found.metrics
        # none left out, none twice, over all steps
        assert here == informative[4 * step : 4 * step + 4]
        assert queue.state() == {"cursor": here[-1] + 1}
        used = range(informative[4 * step - 1] + 1 if step else 0, here[-1] + 1)
        assert said["sampling/dropped"] == pytest.approx(1 - 4 / len(used))
        known = [r for cursor in used for r in rewards[cursor] if r is not None]
        assert said["sampling/reward_mean"] == pytest.approx(sum(known) / len(known))
        assert said["sampling/filled_up"] == 0
        assert not any(workers.pending)  # nothing of this step is left at a server


def test_what_is_not_needed_is_given_up() -> None:
    """The long responses stand behind the groups that are enough: they are not waited for."""
    workers = Script(2, 0, length=lambda cursor: 1 if cursor < 4 else 500)
    made = rollouts(workers, {i: [1, 0, 1] for i in range(9)})
    groups = InformativeGroups(PromptQueue(Numbered()), 4, 3, per_round=8, most_rounds=1)
    step = collected(groups, made, replace(PARAMS, max_new_tokens=600))
    assert cursors(step) == [0, 1, 2, 3]
    assert workers.answered == 12 and workers.forgotten > 0
    assert step.metrics["sampling/given_back"] == 4 and step.metrics["sampling/rounds"] == 1
    assert step.metrics["sampling/waste"] == 0


def test_a_slow_group_is_waited_for() -> None:
    """A step that took the groups that finish first would prefer short responses."""
    workers = Script(1, 0, length=lambda cursor: 60 if cursor == 0 else 1)
    made = rollouts(workers, {i: [1, 0, 1] for i in range(4)})
    groups = InformativeGroups(PromptQueue(Numbered()), 2, 3, per_round=4, most_rounds=1)
    assert cursors(collected(groups, made, replace(PARAMS, max_new_tokens=60))) == [0, 1]


def test_rounds_are_bounded_and_dropped_groups_fill_the_step_up() -> None:
    flat: list[float | None] = [1.0, 1.0, None]
    rewards = {cursor: [1.0, 0.0, 0.0] if cursor in (3, 5) else flat for cursor in range(6)}
    made = rollouts(Script(1, 0), rewards)
    queue = PromptQueue(Numbered())
    groups = InformativeGroups(queue, 4, 3, per_round=2, most_rounds=3)
    step = collected(groups, made, PARAMS)
    assert cursors(step) == [0, 1, 3, 5]
    assert step.metrics["sampling/filled_up"] == 2 and step.metrics["sampling/rounds"] == 3
    assert step.metrics["sampling/waste"] == pytest.approx(1 - 4 / 6)
    assert queue.state() == {"cursor": 6}


def test_a_saved_state_gives_the_same_steps_again() -> None:
    """On the real engine, whose samples are keyed by seed, step and prompt: bit for bit, from any
    step on."""

    def local() -> LocalEngine:
        engine = LocalEngine(str(MODEL), 16)
        engine.begin_weight_update(5)
        engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
        engine.end_weight_update()
        return engine

    @contextlib.asynccontextmanager
    async def verify(answers: int):
        class Judge:
            judges_groups = False

            async def of(self, response: str, answer: str, *_: object) -> Verdict:
                return Verdict(float(response.endswith(answer)), "ok")

        yield Judge()

    def steps(
        first: int, state: dict[str, int] | None, engines: int, seed: int
    ) -> list[tuple[Any, dict[str, int]]]:
        queue = PromptQueue(ArithmeticPrompts(CONFIG, TOKENIZER, "train"))
        if state is not None:
            queue.restore(state)
        replicas = Replicas([local() for _ in range(engines)], seed)
        made = Rollouts(EnginePool(replicas), SingleTurn(CONFIG, TOKENIZER), verify)
        batch = CONFIG.batch.model_copy(
            update={"prompts": 3, "samples_per_prompt": 4, "generate_prompts": 5}
        )
        groups = make_groups(CONFIG.model_copy(update={"batch": batch}), queue)
        found = []
        for step in range(first, 5):
            made_here = collected(groups, made, replace(PARAMS, step=step)).trajectories
            found.append(
                (
                    [
                        (t.prompt.cursor, t.tokens.tolist(), t.log_probs.tolist(), t.reward)
                        for t in made_here
                    ],
                    queue.state(),
                )
            )
        return found

    whole = steps(1, None, 1, 0)
    assert any(len({reward for *_, reward in step}) == 2 for step, _ in whole)
    for saved in (1, 2, 3):
        assert steps(saved + 1, whole[saved - 1][1], 1, saved) == whole[saved:]


def test_without_rounds_every_group_is_taken() -> None:
    made = rollouts(Script(1, 0), {i: [1.0] * 3 for i in range(8)})
    queue = PromptQueue(Numbered())
    groups = make_groups(
        CONFIG.model_copy(update={"batch": BatchConfig(prompts=2, samples_per_prompt=3)}), queue
    )
    assert isinstance(groups, EveryGroup)
    steps = [collected(groups, made, PARAMS) for _ in range(2)]
    assert [cursors(step) for step in steps] == [[0, 1], [2, 3]]
    assert [step.metrics for step in steps] == [{}, {}]


def test_prompts_are_given_back_in_order() -> None:
    queue = PromptQueue(Numbered())
    queue.take(5)
    queue.give_back(3)
    assert queue.state() == {"cursor": 2}
    assert [p.cursor for p in queue.take(4)] == [2, 3, 4, 5]
    queue.give_back(4)
    queue.give_back(0)
    assert [p.cursor for p in queue.take(1)] == [2] and queue.state() == {"cursor": 3}
    with pytest.raises(ValueError, match="2 prompts cannot be given back"):
        queue.give_back(2)
    queue.restore({"cursor": 9})
    assert [p.cursor for p in queue.take(2)] == [9, 10] and queue.state() == {"cursor": 11}
