"""A server is given no more requests than its cache holds, so that a request's limit does not pass
in its queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.models import save_model
from support.sglang_fake import STOP, FakeServer

from megatron_stare.config.load import validate
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest
from megatron_stare.rollout.engines.sglang.server_engine import (
    EXPECTED,
    REMEMBERED,
    CacheRoom,
    SGLangEngine,
)
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, seed=1, step=1, stop_token_ids=(STOP,))
BUCKET = [("model.norm.weight", torch.ones(3)), ("model.embed_tokens.weight", torch.ones(4, 3))]
CACHE = 10_000  # tokens of the fake server, of each of its groups


def requests(count: int) -> list[GenerateRequest]:
    return [GenerateRequest(f"{i}:0", (3, 4), i, 0) for i in range(count)]


@contextlib.contextmanager
def engine(fake: FakeServer, **settings: float) -> Iterator[SGLangEngine]:
    client = fake.client()
    made = SGLangEngine(
        client, TensorSync([client]), MODEL, "float32", 256, asyncio.new_event_loop(), **settings
    )
    try:
        made.begin_weight_update(1)
        made.update_weights(BUCKET)
        made.end_weight_update()
        fake.most_under_way = 0
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("tokens", "at_once"),
    [(20_000.0, 1), (5_000.1, 1), (5_000.0, 2), (312.5, 32), (312.6, 31), (10.0, 40)],
)
def test_a_server_gets_what_its_cache_holds_of_the_expected_length(
    monkeypatch: pytest.MonkeyPatch, tokens: float, at_once: int
) -> None:
    """One at least, and never more than it decodes together or there are. Each is asked for as it
    has room: until then its limit does not count."""
    monkeypatch.setattr(CacheRoom, "came", lambda *_: None)  # what came is another test's matter
    fake = FakeServer("one")
    with engine(fake, request_tokens=tokens) as made:
        found = made.generate(requests(40), PARAMS)
        assert len(found) == 40
        assert made.model_info().capacity == 256
    assert fake.most_under_way == at_once


def test_no_more_are_under_way_than_the_room_has() -> None:
    """Counted where the requests are, with lengths that came as they were expected."""

    async def crowd(room: CacheRoom, count: int) -> int:
        most = inside = 0

        async def one() -> None:
            nonlocal most, inside
            async with room:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                room.came(100)
                inside -= 1

        await asyncio.gather(*(one() for _ in range(count)))
        return most

    assert asyncio.run(crowd(CacheRoom(1000, 256, 100.0), 50)) == 10
    assert asyncio.run(crowd(CacheRoom(1000, 4, 100.0), 50)) == 4
    assert asyncio.run(crowd(CacheRoom(1000, 256, 100.0), 6)) == 6


def test_the_room_follows_the_lengths_that_come() -> None:
    room = CacheRoom(CACHE, 256, 1000.0)
    for _ in range(EXPECTED):
        room.came(100)
    assert room.size == int(CACHE / 550)  # half of what is remembered is the expectation
    for _ in range(REMEMBERED):
        room.came(100)
    assert room.size == 100
    for _ in range(REMEMBERED):
        room.came(2 * CACHE)
    assert room.size == 1


def test_all_that_lengths_make_room_for_enter_as_one_leaves() -> None:
    async def crowd() -> int:
        room, inside, leave = CacheRoom(1000, 256, 1000.0), 0, asyncio.Event()

        async def one(number: int) -> None:
            nonlocal inside
            async with room:
                inside += 1
                for _ in range(5):  # turns of the loop, in which the others come to wait
                    await asyncio.sleep(0)
                if number:
                    await leave.wait()
                for _ in range(REMEMBERED):
                    room.came(10)

        tasks = [asyncio.create_task(one(number)) for number in range(10)]
        await tasks[0]
        for _ in range(50):
            await asyncio.sleep(0)
        entered = inside
        leave.set()
        await asyncio.gather(*tasks)
        return entered

    assert asyncio.run(crowd()) == 10


def test_those_that_wait_enter_though_others_give_up() -> None:
    """Requests of a rollout that is given up leave while an evaluation's wait."""

    async def given_up() -> list[int]:
        room, entered, leave = CacheRoom(10, 1, 10.0), [], asyncio.Event()

        async def one(number: int) -> None:
            async with room:
                entered.append(number)
                await leave.wait()

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        leave.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return entered

    assert asyncio.run(given_up())[-2:] == [2, 3]


def test_a_place_that_was_given_to_one_that_gives_up_is_the_next_one_s() -> None:
    """A request is cancelled between the turn in which it is given its place and the one in which
    it would take it."""

    async def given_up() -> list[int]:
        room, entered, leave = CacheRoom(10, 1, 10.0), [], asyncio.Event()

        async def one(number: int) -> None:
            async with room:
                entered.append(number)
                await leave.wait()

        tasks = [asyncio.create_task(one(number)) for number in range(4)]
        await asyncio.sleep(0)
        leave.set()
        await asyncio.sleep(0)  # the first leaves
        tasks[1].cancel()
        await asyncio.wait(tasks, timeout=10)
        assert all(task.done() for task in tasks)
        return entered

    assert asyncio.run(given_up()) == [0, 2, 3]


def test_first_come_first_served() -> None:
    async def crowd() -> list[int]:
        room, entered = CacheRoom(30, 256, 10.0), []

        async def one(number: int) -> None:
            async with room:
                entered.append(number)
                await asyncio.sleep(0)

        await asyncio.gather(*(one(number) for number in range(20)))
        return entered

    assert asyncio.run(crowd()) == list(range(20))


def test_an_answer_that_comes_teaches_the_room_its_length() -> None:
    fake = FakeServer("one")
    with engine(fake, request_tokens=1000.0) as made:
        made.generate(requests(EXPECTED), PARAMS)
        assert set(made._room._lengths) == {1000.0, 4}  # prompts of 2 tokens, responses of 2
        assert made._room.size == int(CACHE / 502)


def test_groups_with_requests_of_their_own_have_a_cache_each(tmp_path: Path) -> None:
    class Groups(FakeServer):
        def _info(self, body: dict[str, object]) -> dict[str, object]:
            return {**super()._info(body), "attn_dp_size": 2, "tp_size": 2}

    save_model(tmp_path, "qwen3")
    client = Groups("one").client()
    loop = asyncio.new_event_loop()
    made = SGLangEngine(
        client, TensorSync([client]), str(tmp_path), "float32", 256, loop, request_tokens=1000.0
    )
    assert made._room.size == 20
    made.close()


def test_what_is_expected_is_the_plan_s_or_what_is_assumed_of_every_run() -> None:
    lengths = {"max_prompt_tokens": 400, "max_new_tokens": 3000}
    config = validate({"model": {"path": "m"}, "rollout": lengths}, "a.yaml")
    assert config.expected_lengths == (100.0, 1500.0)
    config = validate(
        {
            "model": {"path": "m"},
            "rollout": lengths,
            "plan": {"prompt_tokens": 90, "response_tokens": 700},
        },
        "a.yaml",
    )
    assert config.expected_lengths == (90.0, 700.0)
