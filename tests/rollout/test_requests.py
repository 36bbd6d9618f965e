"""Requests that are lost: real sockets that fail, in front of fake servers, and the bookkeeping by
itself."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replicas import TOKENIZER, Replicas, judged
from support.sglang_fake import STOP, FakeServer
from support.sglang_listening import FAULTS, Faults, Handler, answering, listening, routing

from megatron_stare.config.schema import Config
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import DataError, WeightVersionError
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.rollout.engines.engine import GenerateRequest, LostRequest, RequestLostError
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.rollout.fleet.dispatch import RolloutLateError
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.fleet.health import FleetHealth, RestartRule
from megatron_stare.rollout.fleet.retries import RequestRule, Retries
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.turns import check_versions

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4, seed=1, step=1, stop_token_ids=(STOP,))
CONFIG = Config.model_validate({"model": {"path": MODEL}, "rollout": {"max_new_tokens": 4}})
BUCKET = [("model.norm.weight", torch.ones(3)), ("model.embed_tokens.weight", torch.ones(4, 3))]
VERSION = 7
RULE = RequestRule(attempts=6, back_off_s=0.01)
PROMPTS = [Prompt(40 + i, str(i), "", "", (2, 3 + i)) for i in range(10)]
SAMPLES = 2


def sync(engine: SGLangEngine, version: int) -> None:
    engine.begin_weight_update(version)
    engine.update_weights(BUCKET)
    engine.end_weight_update()


@contextlib.contextmanager
def engines(
    urls: Sequence[str],
    response_s: float = 60.0,
    router: str | None = None,
    capacity: int = 2,
    probe_s: float = 20.0,
) -> Iterator[list[SGLangEngine]]:
    with contextlib.ExitStack() as stack:
        made = []
        for url in urls:
            client = SGLangClient(url, "key", 60.0, response_s=response_s, router=router)
            loop = asyncio.new_event_loop()
            made.append(
                SGLangEngine(
                    client, TensorSync([client]), MODEL, "float32", capacity, loop, probe_s=probe_s
                )
            )
            stack.callback(made[-1].close)
            sync(made[-1], VERSION)
        yield made


def servers(*faults: Faults | None) -> tuple[list[FakeServer], list[Handler]]:
    fakes = [FakeServer(str(number)) for number in range(len(faults))]
    for fake in fakes:
        fake.echo = True
    return fakes, [answering(fake, fault) for fake, fault in zip(fakes, faults, strict=True)]


def rolled_out(
    made: Sequence[SGLangEngine],
    rule: RequestRule = RULE,
    prompts: Sequence[Prompt] = PROMPTS,
    samples: int = SAMPLES,
) -> tuple[list[Any], Counter[str]]:
    """The trajectories of the prompts, and what became of requests."""
    pool = EnginePool(Replicas(made), rule=rule)
    found = Rollouts(pool, SingleTurn(CONFIG, TOKENIZER), judged).make(prompts, samples, PARAMS)
    return found, pool._requests


def require_right(found: Sequence[Any]) -> None:
    """Every sample of every prompt once, each with the answer to its own prompt, of the newest
    weights."""
    assert [(t.prompt.cursor, t.sample_index) for t in found] == [
        (p.cursor, i) for p in PROMPTS for i in range(SAMPLES)
    ]
    assert [t.tokens.tolist() for t in found] == [
        [p.token_ids[-1], STOP] for p in PROMPTS for _ in range(SAMPLES)
    ]
    check_versions(found, VERSION)


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_rollout_survives_requests_that_are_lost(kind: str, replicas: int) -> None:
    """One in five, of one replica; with another beside it, that one is asked next."""
    faults = Faults(kind, every=5 if kind != "late" else 15)
    _, handlers = servers(faults, *[None] * (replicas - 1))
    with (
        listening(*handlers) as urls,
        engines(urls, response_s=60.0 if kind != "late" else 1.5) as made,
    ):
        found, counts = rolled_out(made)
    require_right(found)
    assert faults.planted > 0
    if kind == "late":  # another may be late on a machine as busy as this
        assert (
            counts["rollout/retried"] >= faults.planted
            and counts["rollout/retried_late"] >= faults.planted
        )
    else:
        assert (counts["rollout/retried"], counts["rollout/retried_late"]) == (faults.planted, 0)


def test_a_replica_that_answers_nothing_loses_what_it_has_room_for_to_the_other() -> None:
    faults = Faults("late")
    _, handlers = servers(faults, None)
    with listening(*handlers) as urls, engines(urls, response_s=1.5, capacity=4) as made:
        found, _ = rolled_out(made)
    require_right(found)
    assert 4 <= faults.planted <= 8  # of twenty


@pytest.mark.parametrize("kind", ["500", "reset"])
def test_attempts_are_bounded_and_each_is_named(kind: str) -> None:
    _, handlers = servers(Faults(kind), Faults(kind))
    with listening(*handlers) as urls, engines(urls) as made:
        with pytest.raises(RequestLostError, match="did not come in 3 attempts: attempt 1") as lost:
            rolled_out(made, RequestRule(attempts=3, back_off_s=0.01), PROMPTS[:1], 1)
        assert all(url in str(lost.value) for url in urls)  # the second attempt was the other's
        assert ("refused (500): for now" in str(lost.value)) == (kind == "500")


def test_what_the_server_refuses_for_good_is_not_asked_again() -> None:
    fakes, handlers = servers(None, None)
    with listening(*handlers) as urls, engines(urls) as made:
        for fake in fakes:
            fake.broken, fake.calls = {"/generate"}, []
        with pytest.raises(SGLangError, match="/generate is broken"):
            rolled_out(made)
        # what was under way at first
        assert sum(fake.calls.count("/generate") for fake in fakes) <= 4


def test_a_rollout_has_a_limit_of_its_own() -> None:
    _, handlers = servers(Faults("late"))
    with (
        listening(*handlers) as urls,
        engines(urls) as made,
        pytest.raises(
            RolloutLateError,
            match=r"0 of 20 trajectories were made in 0\.3 s, and 2 requests are under way",
        ),
    ):
        rolled_out(made, RequestRule(rollout_s=0.3))


def test_a_server_that_hangs_does_not_hold_up_who_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last call to a server has its own limit, and is not waited for as long as any call."""
    monkeypatch.setattr("megatron_stare.rollout.engines.sglang.server_engine.ABORT_S", 0.2)
    _, handlers = servers(Faults("hung"))
    with listening(*handlers) as urls, engines(urls, response_s=0.2, probe_s=0.2) as (engine,):
        engine.submit([GenerateRequest("1:0", (2, 3), 1, 0)], PARAMS)
        (lost,) = engine.collect(30.0)
        assert isinstance(lost, LostRequest) and lost.late and lost.gone
        leaving = threading.Thread(target=engine.close, daemon=True)
        leaving.start()
        leaving.join(20.0)  # a call has 60 s
        assert not leaving.is_alive()


def test_an_engine_asked_by_itself_says_what_was_lost() -> None:
    _, handlers = servers(Faults("500"))
    with (
        listening(*handlers) as urls,
        engines(urls) as (engine,),
        pytest.raises(RequestLostError, match=r"request 1:0: http.*refused \(500\): for now"),
    ):
        engine.generate([GenerateRequest("1:0", (2, 3), 1, 0)], PARAMS)


def test_a_router_is_asked_for_responses_and_for_nothing_else() -> None:
    fakes, handlers = servers(None, None)
    seen: list[str] = []
    with listening(*handlers) as urls, listening(routing(urls, seen)) as (router,):
        with engines(urls, router=router) as made:
            before = [fake.calls.count("/generate") for fake in fakes]
            found, _ = rolled_out(made)
            asked = [
                fake.calls.count("/generate") - count
                for fake, count in zip(fakes, before, strict=True)
            ]
            assert [engine.prompt_log_probs([(3, 4, 5)]) for engine in made] == [
                [[-0.25, -0.25]]
            ] * 2
        require_right(found)
        assert asked == [10, 10]  # which engine was asked had no say
        assert seen == ["/generate"] * 20


def test_tokens_that_come_through_a_router_are_held_against_their_versions() -> None:
    """One of the servers behind it is another run's, or was not synced."""
    fakes, handlers = servers(None, None)
    with (
        listening(*handlers) as urls,
        listening(routing(urls, [])) as (router,),
        engines(urls, router=router) as made,
    ):
        fakes[1].version = str(VERSION - 1)
        found, _ = rolled_out(made)
        with pytest.raises(WeightVersionError, match="version 6: 20 tokens, version 7: 20 tokens"):
            check_versions(found, VERSION)
        fakes[1].version = "none"
        with pytest.raises(SGLangError, match="only this project may update"):
            rolled_out(made)


def test_a_router_that_loses_requests_is_asked_again() -> None:
    _, handlers = servers(Faults("500", every=3), Faults("reset", every=4))
    with (
        listening(*handlers) as urls,
        listening(routing(urls, [])) as (router,),
        engines(urls, router=router) as made,
    ):
        found, counts = rolled_out(made)
    require_right(found)
    assert counts["rollout/retried"] > 0


class Told:
    """Retries of requests and health of the two replicas that lose them, without a pool."""

    def __init__(self, attempts: int = 3) -> None:
        self.retries, self.health = (
            Retries(RequestRule(attempts)),
            FleetHealth(2, RestartRule(), back_off_s=1.0),
        )
        for replica in range(2):
            self.health.came_up(replica)
            self.health.synced(replica, VERSION, True)
        self.give, self.room, self.metrics = (
            self.retries.give,
            self.health.room,
            self.retries.metrics,
        )

    def choose(self, rid: str, rooms: Sequence[int | None], now: float) -> int | None:
        return self.retries.choose(rid, rooms, self.health.avoided(now), self.health.suspected())

    def lost(self, lost: LostRequest, replica: int, now: float) -> float:
        """When the replica may be given anything again."""
        _, given = self.retries.given()[lost.rid]
        self.retries.lost(lost, replica)
        self.health.lost_request(replica, lost.reason, given, now)
        return self.health.open_again(replica)

    def answered(self, rid: str, replica: int) -> None:
        self.retries.answered(rid, replica)
        self.health.answered(replica)


def test_another_replica_is_asked_though_the_first_has_more_room() -> None:
    told = Told()
    assert told.choose("a", [5, 2], 0.0) == 0
    told.give("a", 0, 0.0)
    assert told.lost(LostRequest("a", "cut"), 0, 0.1) == 1.1  # open again
    assert (
        told.room(0, 8, 0, 1.0) == 0
        and told.room(0, 8, 0, 1.1) == 1
        and told.room(0, 8, 1, 1.1) == 0
    )
    assert told.choose("a", [1, 1], 2.0) == 1
    assert told.choose("a", [9, 0], 2.0) is None  # it waits for the other
    # which another request has no reason to, and so is the test
    assert told.choose("b", [1, 9], 2.0) == 0
    assert told.choose("b", [0, 9], 2.0) == 1  # while that is under way, the other
    told.give("a", 1, 2.0)
    told.lost(LostRequest("a", "cut"), 1, 2.1)
    assert told.choose("a", [1, 0], 4.0) == 0  # both have lost it
    told.give("b", 0, 4.0)
    told.answered("b", 0)
    assert told.room(0, 8, 0, 4.0) == 8


def test_back_off_doubles_by_each_lost_after_another_and_not_by_those_lost_together() -> None:
    told = Told(attempts=99)
    for rid in "abc":
        told.give(rid, 0, 0.0)
    assert [told.lost(LostRequest(rid, "killed"), 0, 0.5) for rid in "abc"] == [1.5] * 3
    for now, until in ((2.0, 4.1), (5.0, 9.1), (10.0, 18.1)):
        told.give("a", 0, now)
        assert told.lost(LostRequest("a", "killed"), 0, now + 0.1) == pytest.approx(until)
    assert told.metrics == {"rollout/retried": 6, "rollout/retried_late": 0}


def test_one_that_hangs_is_avoided_for_as_long_as_it_took_where_there_is_another() -> None:
    told = Told(attempts=99)
    told.give("a", 0, 0.0)
    told.lost(LostRequest("a", "late", late=True), 0, 600.0)
    assert told.metrics["rollout/retried_late"] == 1
    assert told.choose("b", [1, 0], 700.0) is None and told.choose("b", [1, 1], 1200.0) is not None
    told.give("b", 1, 700.0)
    told.lost(LostRequest("b", "late", late=True), 1, 1190.0)
    assert told.choose("c", [1, 0], 1199.0) == 0  # both hang, and waiting for either gains nothing


def test_an_answer_is_taken_once_and_from_who_was_asked() -> None:
    told = Told()
    told.give("a", 0, 0.0)
    told.lost(LostRequest("a", "late", late=True), 0, 1.0)
    told.give("a", 1, 2.0)
    with pytest.raises(DataError, match="was not sent, or answered one twice"):
        told.answered("a", 0)  # what it called lost comes after all
    told.give("a", 1, 2.0)
    told.answered("a", 1)
    told.give("b", 0, 3.0)
    given_up = LostRequest("b", "late", late=True)
    told.lost(given_up, 0, 4.0)
    told.retries.forget(given_up)
    assert told.metrics == {"rollout/retried": 1, "rollout/retried_late": 1}  # a's
    with pytest.raises(DataError, match="was not sent, or answered one twice"):
        told.answered("a", 1)
