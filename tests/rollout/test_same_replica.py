"""The turns of a trajectory go to the replica that had the ones before, which holds their keys and
values."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replicas import TOKENIZER, judged

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Response
from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.rollout.engines.engine import (
    GenerateRequest,
    GenerateResult,
    LostRequest,
    ModelInfo,
)
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.dispatch import Dispatch, Serving
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.fleet.fleet import Fleet
from megatron_stare.rollout.fleet.health import RestartRule
from megatron_stare.rollout.fleet.retries import RequestRule, Retries
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.under_way import UnderWay

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
CONFIG = Config.model_validate({"model": {"path": MODEL}, "rollout": {"max_new_tokens": 24}})
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=1, stop_token_ids=(1,))
TURNS = 4


def answer(request: GenerateRequest) -> GenerateResult:
    """Answers with as many tokens as were asked for."""
    n = request.max_new_tokens or 1
    return GenerateResult(
        request.rid, torch.full((n,), 5, dtype=torch.int32), torch.zeros(n), ((0, n),), "length", 2
    )


class Servers(Workers):
    """They answer in an order, and after a number of turns of the event loop, that are drawn from a
    seed."""

    def __init__(self, replicas: int, capacity: int, seed: int) -> None:
        self._capacity, self._order = capacity, random.Random(seed)
        self._pending: list[list[GenerateRequest]] = [[] for _ in range(replicas)]
        self.had: dict[tuple[int, int], list[int]] = {}  # by trajectory, the replicas of its turns
        self.open: set[tuple[int, int]] = set()  # trajectories that are begun and not finished
        self.most_open = 0

    def __len__(self) -> int:
        return len(self._pending)

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        if method == "bring_up":
            return ModelInfo(0, EngineState.HEALTHY, 99, 99, (1,), self._capacity)
        mine = self._pending[worker]
        for request in args[0]:
            key = request.prompt_cursor, request.sample_index
            self.had.setdefault(key, []).append(worker)
            self.open.add(key)
        self.most_open = max(self.most_open, len(self.open))
        mine += args[0]
        assert len(mine) <= self._capacity
        self._order.shuffle(mine)
        count = self._order.randrange(1 + len(mine))
        done, mine[:] = mine[:count], mine[count:]
        for request in done:
            if len(self.had[request.prompt_cursor, request.sample_index]) == TURNS:
                self.open.discard((request.prompt_cursor, request.sample_index))
        return [answer(request) for request in done]

    def wait(self, handles: Any, on_done: Any = None) -> list[Any]:
        return list(handles)

    async def result(self, handle: Any) -> Any:
        for _ in range(self._order.randrange(1, 9)):
            await asyncio.sleep(0)
        return handle

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


class Turns(Environment):
    """Asks again at once."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        response = Response(prompt)
        for turn in range(TURNS):
            response.sampled(await generate(response.context, max_new_tokens=2))
            if turn < TURNS - 1:
                response.observed([7])
        return response.trajectory()


@pytest.mark.parametrize("capacity", [2, 5, 64])
@pytest.mark.parametrize("seed", range(3))
def test_the_turns_of_a_trajectory_stay_where_the_first_was(capacity: int, seed: int) -> None:
    servers = Servers(3, capacity, seed)
    prompts = [Prompt(cursor, str(cursor), "", "", (7, 8)) for cursor in range(15)]
    made = Rollouts(EnginePool(servers), Turns(CONFIG, TOKENIZER), judged).make(prompts, 2, PARAMS)
    assert len(made) == 30
    assert all(
        len(replicas) == TURNS and len(set(replicas)) == 1 for replicas in servers.had.values()
    )
    assert {replicas[0] for replicas in servers.had.values()} == {0, 1, 2}
    assert servers.most_open <= 3 * capacity  # what is begun comes before what is not


def test_a_response_that_was_cut_is_continued_where_it_was() -> None:
    servers = Servers(3, 64, 0)
    prompts = [Prompt(cursor, str(cursor), "", "", (7, 8)) for cursor in range(8)]
    responses = [UnderWay(prompt, index, 1) for prompt in prompts for index in range(2)]
    made = Rollouts(EnginePool(servers), Turns(CONFIG, TOKENIZER), judged)
    for _ in range(4):
        left = [response for response in responses if response.trajectory is None]
        random.Random(4).shuffle(left)
        asyncio.run(made.carry_on(left, PARAMS, tokens=2))
    assert all(response.trajectory is not None for response in responses)
    assert all(
        len(replicas) == TURNS and len(set(replicas)) == 1 for replicas in servers.had.values()
    )


class Held(Workers):
    """Servers that answer when they are told to."""

    def __init__(self, replicas: int, capacity: int) -> None:
        self.answers: list[asyncio.Queue[list[Any]]] = [asyncio.Queue() for _ in range(replicas)]
        self._info = ModelInfo(0, EngineState.HEALTHY, 99, 99, (1,), capacity)

    def __len__(self) -> int:
        return len(self.answers)

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        return self._info if method == "bring_up" else worker

    async def result(self, handle: Any) -> Any:
        return await self.answers[handle].get()

    def wait(self, handles: Any, on_done: Any = None) -> list[Any]:
        return list(handles)

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


class Scene:
    """Two replicas, and who is asked for what."""

    def __init__(self, capacity: int, back_off_s: float) -> None:
        self.servers = Held(2, capacity)
        self.fleet = Fleet(self.servers, RestartRule(), back_off_s)
        self.begin()
        self.requests: dict[str, GenerateRequest] = {}
        self.tasks: list[asyncio.Task[GenerateResult]] = []

    def begin(self) -> None:
        """The next rollout."""
        self.retries = Retries(RequestRule(attempts=9))
        self.dispatch = Dispatch(self.fleet, lambda: False, self.retries)
        self.serving = Serving(self.dispatch, PARAMS, 99)

    async def ask(self, rid: str, replica: int | None = None) -> None:
        self.requests[rid] = GenerateRequest(rid, (7, 8), 0, 0, max_new_tokens=1, replica=replica)
        self.tasks.append(asyncio.create_task(self.serving.generate(self.requests[rid])))
        await settle()

    async def answer(self, replica: int, rid: str, lost: bool = False) -> None:
        await self.servers.answers[replica].put(
            [LostRequest(rid, "cut") if lost else answer(self.requests[rid])]
        )
        await settle()

    @property
    def where(self) -> dict[str, int]:
        """Which replica has each request."""
        return {rid: replica for rid, (replica, _) in self.retries._given.items()}


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Stopped(asyncio.SelectorEventLoop):
    """A loop whose clock stands: how fast the machine is decides nothing."""

    now = 1e3

    def time(self) -> float:
        return self.now


def played(scene: Coroutine[Any, Any, Any]) -> Any:
    loop = Stopped()
    try:
        return loop.run_until_complete(scene)
    finally:
        loop.close()


@asynccontextmanager
async def scene(capacity: int = 1, back_off_s: float = 0.0) -> AsyncIterator[Scene]:
    found = Scene(capacity, back_off_s)
    try:
        yield found
    finally:
        for task in found.tasks:
            task.cancel()
        await asyncio.gather(*found.tasks, return_exceptions=True)
        await found.dispatch.stop()


def test_one_whose_replica_is_full_lets_others_have_the_rest() -> None:
    async def play() -> None:
        async with scene() as it:
            await it.ask("a")
            await it.ask("b")
            assert it.where == {"a": 0, "b": 1}
            await it.ask("continues", replica=0)
            await it.ask("begins")
            await it.answer(1, "b")
            # it had come later, and waits for no replica of its own
            assert it.where == {"a": 0, "begins": 1}
            await it.ask("begins too")
            await it.answer(0, "a")
            assert it.where == {"continues": 0, "begins": 1}  # in front of what is begun

    played(play())


def test_no_replica_is_idle_for_the_sake_of_one_that_is_full() -> None:
    async def play() -> None:
        async with scene() as it:
            await it.ask("a")
            await it.ask("continues", replica=0)
            assert it.where == {"a": 0, "continues": 1}
            await it.answer(1, "continues")
            assert it.tasks[1].result().replica == 1  # from now on it is at home there

    played(play())


def test_a_replica_that_lost_a_request_is_not_waited_for() -> None:
    async def play(lost: bool) -> dict[str, int]:
        async with scene(capacity=2) as it:
            await it.ask("a", replica=0)
            await it.ask("b", replica=1)
            await it.ask("c", replica=1)
            await it.ask("continues", replica=0)
            # which is asked of the other, whose two places are taken
            await it.answer(0, "a", lost=lost)
            await it.ask("more", replica=0)
            await it.ask("begins")
            await it.answer(1, "b")
            await it.answer(1, "c")
            return it.where

    assert played(play(False)) == {"continues": 0, "more": 0, "begins": 1}
    assert played(play(True)) == {"continues": 0, "a": 1, "more": 1}


def test_a_replica_that_lost_a_request_is_tried_with_one_and_not_preferred_else() -> None:
    """Until it has answered one: it has room, but for one at a time."""

    async def play() -> list[int]:
        async with scene(capacity=4) as it:
            await it.ask("a", replica=0)
            await it.answer(0, "a", lost=True)  # which is asked of the other
            await it.ask("tries")
            await it.ask("continues", replica=0)
            return [it.where[rid] for rid in ("a", "tries", "continues")]

    assert played(play()) == [1, 0, 1]


def test_a_replica_is_left_alone_for_as_long_as_it_took_to_lose_a_request() -> None:
    async def play(later_s: float) -> int:
        async with scene(capacity=4) as it:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, Stopped)
            await it.ask("a", replica=0)
            loop.now += 5.0
            await it.answer(0, "a", lost=True)
            loop.now += later_s
            await it.ask("next")
            return it.where["next"]

    assert played(play(4.0)) == 1
    assert played(play(6.0)) == 0


def test_a_request_that_is_given_up_leaves_its_line() -> None:
    async def play() -> Sequence[str]:
        async with scene() as it:
            await it.ask("a")
            await it.ask("b")
            await it.ask("continues", replica=0)
            it.tasks[-1].cancel()
            await it.answer(0, "a")
            return [*it.where]

    assert played(play()) == ["b"]


def test_a_rollout_that_is_given_up_does_not_search_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal gives a run seconds to save; a rollout may have tens of thousands of requests."""
    compared = [0]

    def counts(one: object, other: object) -> bool:
        compared[0] += 1
        return one is other

    async def play() -> dict[str, int]:
        async with scene(capacity=50) as it:
            for number in range(300):
                await it.ask(f"new {number}")
            for number in range(100):
                await it.ask(f"continues {number}", replica=number % 2)
            monkeypatch.setattr(GenerateRequest, "__eq__", counts)
            for task in it.tasks:
                task.cancel()
            await settle()
            for number in (0, 1):
                await it.answer(number, f"new {number}")
            return it.where

    left = played(play())  # at the replicas, and nothing that waited has followed
    assert len(left) == 98 and not any("continues" in rid for rid in left)
    assert compared[0] < 1000


def test_a_replica_that_lost_requests_is_given_one_at_a_time_in_the_next_rollout_too() -> None:
    """At once, whatever its back-off was, and until it answers."""

    async def play() -> None:
        async with scene(capacity=2, back_off_s=60.0) as it:
            for rid in "abcd":
                await it.ask(rid)
            await it.answer(0, "a", lost=True)
            await it.answer(0, "c", lost=True)
            await it.dispatch.stop()
            for task in it.tasks:
                task.cancel()
            it.begin()
            for rid in "efgh":
                await it.ask(rid)
            assert it.where == {"e": 0, "f": 1, "g": 1}
            await it.answer(0, "e")
            await it.ask("i")
            assert it.where == {"f": 1, "g": 1, "h": 0, "i": 0}

    played(play())
