"""Rollouts sampled ahead of training: how old a token may be, which prompts make which batch, what
a publish stops."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.replicas import TOKENIZER, Numbered

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import DataError
from megatron_stare.process.workers import WorkerLostError, Workers
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult, ModelInfo
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.asynchronous_source import AsynchronousSource
from megatron_stare.rollout.sources.group_sampling import EveryGroup, InformativeGroups
from megatron_stare.rollout.sources.rollout_source import Rollouts

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
CONFIG = Config.model_validate({"model": {"path": MODEL}, "rollout": {"max_new_tokens": 24}})
STOP = 1
WEIGHTS: Any = SimpleNamespace(layouts=(), buckets=lambda checksums=True: iter(()), checksums=dict)


class TokenByToken:
    """A replica that adds a token to each response it has, whenever it is asked: of the weights of
    then.

    lengths: of a response, by prompt and sample; the last token stops it.
    asked: is told each time.
    per_version: tokens it makes of a response with the same weights, at most.
    """

    def __init__(
        self,
        capacity: int | None,
        lengths: Any,
        asked: Any = lambda: None,
        per_version: int = 10**9,
    ) -> None:
        self._capacity, self._lengths, self._asked, self._per_version = (
            capacity,
            lengths,
            asked,
            per_version,
        )
        # versions of a response's tokens
        self.made: dict[str, tuple[GenerateRequest, list[int]]] = {}
        self.version: int | None = None

    def advance(
        self, new: Sequence[GenerateRequest], params: SamplingParams, wait_s: float
    ) -> list[GenerateResult]:
        self._asked()
        assert self.version is not None, "asked for tokens in the middle of a weight update"
        self.made |= {request.rid: (request, []) for request in new}
        done = []
        for rid, (request, versions) in list(self.made.items()):
            if versions.count(self.version) < self._per_version:
                versions.append(self.version)
            if len(versions) == self._lengths(request.prompt_cursor, request.sample_index):
                done.append(self._result(request, versions))
                del self.made[rid]
        return done

    def _result(self, request: GenerateRequest, versions: list[int]) -> GenerateResult:
        n = len(versions)
        ids = torch.full((n,), 3 + request.sample_index, dtype=torch.int32)
        ids[-1] = STOP
        runs = tuple((version, versions.count(version)) for version in sorted(set(versions)))
        return GenerateResult(
            request.rid, ids, torch.zeros(n), runs, "stop", 2, text=str(request.sample_index)
        )

    def bring_up(self) -> ModelInfo:
        return ModelInfo(None, EngineState.DIRTY, 64, 64, (STOP,), self._capacity)

    def begin_weight_update(self, version: int, prove: bool) -> None:
        self.version, self._next = None, version

    def end_weight_update(self) -> dict[str, str]:
        self.version = self._next
        return {}

    def expect_buckets(self, layouts: Any) -> None: ...

    def abort(self) -> None:
        self.made.clear()


class Fleet(Workers):
    """Replicas of this process, whose answers take some turns of the event loop, drawn from a
    seed."""

    def __init__(self, replicas: Sequence[Any], seed: int = 0) -> None:
        self._replicas, self._order = list(replicas), random.Random(seed)

    def __len__(self) -> int:
        return len(self._replicas)

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        return getattr(self._replicas[worker], method)(*args)

    def wait(
        self, handles: Sequence[Any], on_done: Any = None, timeout_s: float | None = None
    ) -> list[Any]:
        return list(handles)

    async def result(self, handle: Any) -> Any:
        for _ in range(self._order.randrange(1, 20)):
            await asyncio.sleep(0)
        return handle

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


@contextlib.asynccontextmanager
async def judged(answers: int):
    """Right where sample and prompt are both even or both odd, but no sample of every third
    prompt."""

    class Judge:
        judges_groups = False

        async def of(self, response: str, answer: str, *_: object) -> Verdict:
            cursor = int(answer)
            return Verdict(float(cursor % 3 != 0 and (cursor + int(response)) % 2 == 0), "ok")

    yield Judge()


def params(step: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, max_new_tokens=24, seed=3, step=step, stop_token_ids=(STOP,)
    )


@contextlib.contextmanager
def source(
    replicas: Sequence[Any],
    staleness: int,
    steps: int = 20,
    dynamic: bool = False,
    seed: int = 0,
    sampling: Any = params,
    masked_from: int | None = None,
    verify: Any = judged,
):
    """With two groups a step, of two samples each."""
    queue = PromptQueue(Numbered())
    groups = InformativeGroups(queue, 2, 2, 1, 9) if dynamic else EveryGroup(queue, 2, 2)
    made = Rollouts(EnginePool(Fleet(replicas, seed)), SingleTurn(CONFIG, TOKENIZER), verify)
    found = AsynchronousSource(
        made, groups, sampling, queue.state, staleness, steps, masked_from=masked_from
    )
    try:
        yield found
    finally:
        found.close()
        assert threading.active_count() == 1 or all(
            thread.name != "rollouts" for thread in threading.enumerate()
        )


def all_of_length(n: int) -> Any:
    return lambda cursor, sample: n


def cursors(batch: Any) -> list[int]:
    return sorted({t.prompt.cursor for t in batch.trajectories})


def ages(batch: Any, step: int) -> set[int]:
    return {step - 1 - version for t in batch.trajectories for version, _ in t.versions}


async def whatever_may_be(found: AsynchronousSource, steps: int) -> None:
    """Waits until so many steps have been sampled ahead, and then long enough for another one to
    begin."""
    async with found._changed:
        await found._changed.wait_for(lambda: len(found._ahead) >= steps)
    await asyncio.gather(*found._ahead.values())
    for _ in range(200):
        await asyncio.sleep(0)


async def stuck(slow: TokenByToken, responses: int) -> None:
    """Waits until it has so many responses, each with three tokens of its weights."""
    while len(slow.made) < responses or any(
        made[-3:].count(slow.version) < 3 for _, made in slow.made.values()
    ):
        await asyncio.sleep(0)


@pytest.mark.parametrize("capacity", [None, 64])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_stalled_trainer_is_run_ahead_of_as_far_as_allowed(
    capacity: int | None, bound: int
) -> None:
    """Engines that finish at once: what they sample is as old as it may be, and they stop there."""
    with source(
        [TokenByToken(capacity, all_of_length(3)) for _ in range(2)], bound, steps=9
    ) as found:
        found.publish(WEIGHTS, 0)
        for step in range(1, 10):
            begun = min(step + bound, 9)
            found._wait(partial(whatever_may_be, found, begun - step + 1))
            assert found._prompts() == {"cursor": 2 * begun}
            assert found.state() == {"cursor": 2 * (step - 1)}
            batch = found.next(step)
            assert cursors(batch) == [2 * step - 2, 2 * step - 1]
            age = min(bound, step - 1)
            assert ages(batch, step) == {age}
            assert found.metrics["staleness/mean_age"] == found.metrics["staleness/max_age"] == age
            assert found.metrics["staleness/steps_ahead"] == begun - step
            found.publish(WEIGHTS, step)
        assert found.state() == {"cursor": 18}
        with pytest.raises(ValueError, match="step 10 of 9"):
            found.next(10)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_stalled_engines_go_on_with_the_weights_of_then(bound: int) -> None:
    """Responses are under way while weights are published, and carry on where they were: engines
    that make three tokens of a response with each version finish it with the last that it may
    have."""
    slow = TokenByToken(
        64, lambda cursor, sample: 3 * min(cursor // 2 + 1, bound + 1), per_version=3
    )

    with source([slow], bound, steps=15) as found:
        found.publish(WEIGHTS, 0)
        for step in range(1, 16):
            batch = found.next(step)
            found._wait(partial(stuck, slow, 4 * (min(step + bound, 15) - step)))
            assert cursors(batch) == [2 * step - 2, 2 * step - 1]
            for trajectory in batch.trajectories:
                assert trajectory.versions == tuple(
                    (v, 3) for v in range(max(0, step - 1 - bound), step)
                )
            found.publish(WEIGHTS, step)


def test_stale_tokens_may_be_masked() -> None:
    """Responses that grow by three tokens a version, over as many versions as the bound allows."""
    slow = TokenByToken(64, lambda cursor, sample: 3 * min(cursor // 2 + 1, 3), per_version=3)
    with source([slow], 2, steps=6, masked_from=2) as found:
        found.publish(WEIGHTS, 0)
        for step in range(1, 7):
            batch = found.next(step)
            found._wait(partial(stuck, slow, 4 * (min(step + 2, 6) - step)))
            ages = step - 1 - batch.weight_versions
            assert batch.loss_mask.tolist() == (ages < 2).tolist()
            assert found.metrics["staleness/masked"] == pytest.approx(
                float((ages >= 2).double().mean())
            )
            assert set(ages.tolist()) <= {0, 1, 2} and (step < 3 or set(ages.tolist()) == {0, 1, 2})
            found.publish(WEIGHTS, step)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bound", [0, 2])
def test_refills_beside_weight_updates(bound: int, seed: int) -> None:
    """Rounds open and close the way to the replicas while weights are published: none is asked in
    the middle, and the groups are those of the stream's order."""
    rng = random.Random(seed)
    lengths = {
        (cursor, sample): rng.randrange(1, 9) for cursor in range(200) for sample in range(2)
    }
    replicas = [TokenByToken(3, lambda *which: lengths[which]) for _ in range(2)]
    with source(replicas, bound, steps=12, dynamic=True, seed=seed) as found:
        found.publish(WEIGHTS, 0)
        used = []
        for step in range(1, 13):
            batch = found.next(step)
            assert found.metrics["sampling/rounds"] >= 2
            used += cursors(batch)
            assert max(ages(batch, step)) <= bound
            assert found.state()["cursor"] <= used[-1] + 1 + (used[-1] + 1) % 3 // 2
            found.publish(WEIGHTS, step)
        assert used == [cursor for cursor in range(200) if cursor % 3][:24]


def test_an_error_is_that_of_the_step_that_waits_for_it() -> None:
    """The step that fails was begun ahead: the steps before it are trained on first."""
    broken = threading.Event()

    def asked() -> None:
        if broken.is_set():
            raise DataError("the engine has had enough")

    with source([TokenByToken(None, all_of_length(2), asked)], 1) as found:
        found.publish(WEIGHTS, 0)
        found.next(1)
        found._wait(partial(whatever_may_be, found, 1))
        broken.set()
        found.publish(WEIGHTS, 1)
        assert len(found.next(2).trajectories) == 4
        with pytest.raises(DataError, match="had enough"):
            found.next(3)


@contextlib.asynccontextmanager
async def judged_to_prompt_1(answers: int):
    """Cannot verify answers to later prompts than prompt 1."""

    class Judge:
        judges_groups = False

        async def of(self, response: str, answer: str, *_: object) -> Verdict:
            if int(answer) > 1:
                raise DataError("the verifier has had enough")
            return Verdict(1.0, "ok")

    yield Judge()


def test_an_error_of_the_next_step_leaves_this_steps_requests_at_the_replica() -> None:
    """One sample of each of the next step's prompts is shorter, and fails while this step's are
    being sampled. The other is longer, and is at the replica when this step ends."""
    replica = TokenByToken(None, lambda cursor, sample: 20 if cursor < 2 else 22 if sample else 3)
    with source([replica], 1, steps=2, verify=judged_to_prompt_1) as found:
        found.publish(WEIGHTS, 0)
        # not `next`, which would wait for ever for requests that the replica has dropped
        begun = asyncio.run_coroutine_threadsafe(found._taken(1), found._loop)
        assert len(begun.result(timeout=60).trajectories) == 4
        found.publish(WEIGHTS, 1)
        with pytest.raises(DataError, match="had enough"):
            found.next(2)
        assert not replica.made  # the last one to leave has aborted what nobody waits for


def test_a_hold_does_not_outlive_the_error_that_it_met() -> None:
    """A step that was begun has failed. Whoever wanted the engines is told, and steps may begin as
    before."""
    broken = threading.Event()

    def asked() -> None:
        if broken.is_set():
            raise DataError("the engine has had enough")

    with source([TokenByToken(None, all_of_length(2), asked)], 1) as found:
        found.publish(WEIGHTS, 0)
        found.next(1)
        broken.set()
        found.publish(WEIGHTS, 1)
        with pytest.raises(DataError, match="had enough"), found.quiet():
            raise AssertionError("the engines are nobody's")
        assert not found._held


class Mortal(TokenByToken):
    """Is lost in the `fatal` call of the update to version 4."""

    def __init__(self, fatal: str, *settings: Any) -> None:
        super().__init__(*settings)
        self._fatal, self.lost, self._to, self.asked_of = fatal, False, -1, set[str]()

    def advance(
        self, new: Sequence[GenerateRequest], params: SamplingParams, wait_s: float
    ) -> list[GenerateResult]:
        assert not self.lost, "asked for tokens after it was lost"
        self.asked_of |= {request.rid for request in new}
        return super().advance(new, params, wait_s)

    def begin_weight_update(self, version: int, prove: bool) -> None:
        self._to = version
        self._die_in("begin_weight_update")
        super().begin_weight_update(version, prove)

    def update_weights(self, number: int, bucket: Any) -> None:
        self._die_in("update_weights")

    def end_weight_update(self) -> dict[str, str]:
        self._die_in("end_weight_update")
        return super().end_weight_update()

    def _die_in(self, call: str) -> None:
        if call == self._fatal and self._to == 4:
            self.lost = True
            raise WorkerLostError("a rollout engine process died")


@pytest.mark.parametrize("fatal", ["begin_weight_update", "update_weights", "end_weight_update"])
def test_a_replica_lost_in_a_weight_update_gives_what_it_had_to_the_other(fatal: str) -> None:
    """With responses of it under way, of steps ahead: every prompt is in its batch once, none older
    than the bound; the update has reached the other one."""
    # it never ends those of step 5
    lost = Mortal(fatal, 3, lambda cursor, sample: 3 if cursor < 8 else 10**9)
    left = Mortal("", 3, all_of_length(3))
    weights = SimpleNamespace(
        layouts=(), buckets=lambda checksums=True: iter([(0, []), (1, [])]), checksums=dict
    )
    with source([lost, left], 2, steps=9) as found:
        found.publish(weights, 0)
        for step in range(1, 10):
            batch = found.next(step)
            assert [(t.prompt.cursor, t.sample_index) for t in batch.trajectories] == [
                (cursor, sample) for cursor in (2 * step - 2, 2 * step - 1) for sample in range(2)
            ]
            assert max(ages(batch, step)) <= 2
            if step == 4:
                found._wait(partial(at_work, lost))
            found.publish(weights, step)
        assert lost.lost and left.version == 9
        assert lost.asked_of & left.asked_of  # made again by the other


async def at_work(replica: Any) -> None:
    """Waits until it has responses under way."""
    while not replica.made:
        await asyncio.sleep(0)


def test_sampling_that_cuts_the_support_is_refused() -> None:
    with source(
        [TokenByToken(None, all_of_length(2))],
        0,
        sampling=lambda step: replace(params(step), top_p=0.9),
    ) as it:
        it.publish(WEIGHTS, 0)
        with pytest.raises(ValueError, match="whole distribution"):
            it.next(1)


def test_closing_gives_up_what_is_under_way() -> None:
    never = TokenByToken(64, all_of_length(10**9))
    with source([never], 2) as found:
        found.publish(WEIGHTS, 0)
    assert not never.made  # aborted, not forgotten
    found.close()  # once more
