"""Partial rollouts: what a cut keeps and how it is continued, which groups a step takes, and how
old its tokens are."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.check_again import CheckAgain
from safetensors.torch import load_file
from support.replicas import TOKENIZER, Numbered, Replicas, judged

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptQueue
from megatron_stare.environments.environment import Environment, Response
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import DataError, WeightVersionError
from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult, ModelInfo
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.state import EngineState
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.partial_sampling import PartialGroups
from megatron_stare.rollout.sources.rollout_source import Collected, Rollouts
from megatron_stare.rollout.sources.under_way import Answer, UnderWay, joined

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
STOP = 1
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=1, stop_token_ids=(STOP,))
CONFIG = Config.model_validate({"model": {"path": str(MODEL)}, "rollout": {"max_new_tokens": 24}})


def publish(engine: LocalEngine, version: int) -> None:
    """The same weights under another version."""
    engine.begin_weight_update(version)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()


def prompts(count: int) -> list[Prompt]:
    texts = [f"{10 + 7 * i}+{99 - i}+{20 + i}=" for i in range(count)]
    return [
        Prompt(40 + i, str(i), t, str(i), tuple(TOKENIZER(t).input_ids))
        for i, t in enumerate(texts)
    ]


@pytest.mark.parametrize(("environment", "longest"), [(SingleTurn, 20), (CheckAgain, 24)])
def test_a_response_cut_over_steps_equals_the_uncut_one_under_frozen_weights(
    environment: type[Environment], longest: int
) -> None:
    """Kept as bytes in between, as a checkpoint has it."""
    engine = LocalEngine(str(MODEL), 5)
    publish(engine, 0)
    made = Rollouts(EnginePool(Replicas([engine])), environment(CONFIG, TOKENIZER), judged)
    params = replace(PARAMS, max_new_tokens=longest)
    whole = made.make(prompts(5), 3, params)
    groups = [[UnderWay(prompt, index, PARAMS.step) for index in range(3)] for prompt in prompts(5)]
    steps = 0
    while unfinished := [each for group in groups for each in group if each.trajectory is None]:
        steps += 1
        publish(engine, steps - 1)
        asyncio.run(made.carry_on(unfinished, replace(params, step=steps), tokens=4))
        assert all(each.tokens == 4 * steps for each in unfinished if each.trajectory is None)
        groups = from_bytes(to_bytes(groups))
    assert steps >= 4
    cut = [each.trajectory for group in groups for each in group]
    for one, other in zip(cut, whole, strict=True):
        assert one is not None
        assert torch.equal(one.tokens, other.tokens) and torch.equal(one.loss_mask, other.loss_mask)
        assert (one.text, one.finish_reason, one.reward) == (
            other.text,
            other.finish_reason,
            other.reward,
        )
        # the prefix is computed at one go where it had been computed token by token
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=0, atol=1e-5)
        sampled = [version for version, n in one.versions for _ in range(n) if version >= 0]
        assert sampled == [token // 4 for token in range(len(sampled))]
    assert {t.finish_reason for t in whole} == {"stop", "length"}


class Growing(Workers):
    """Servers whose responses are known beforehand: token i of the response to a prompt is 3 +
    (cursor + i) % 50, and the last one stops it.

    length: of a response, by cursor and sample.
    version: of the weights they hold.
    """

    def __init__(
        self, length: Any, capacity: int | None = 16, engines: int = 2, seed: int = 0
    ) -> None:
        self.length, self.version, self.asked = length, 0, 0
        self._capacity, self._engines, self._order = capacity, engines, random.Random(seed)
        self._pending: list[list[GenerateRequest]] = [[] for _ in range(engines)]

    def __len__(self) -> int:
        return self._engines

    def start_on(self, worker: int, method: str, *args: Any) -> Any:
        if method == "bring_up":
            return ModelInfo(0, EngineState.HEALTHY, 99, 99, (STOP,), self._capacity)
        assert method == "advance"  # nothing is ever aborted: what is cut has been answered
        mine = self._pending[worker]
        mine += args[0]
        self._order.shuffle(mine)
        done, mine[:] = mine[: len(mine) // 2 + 1], mine[len(mine) // 2 + 1 :]
        return [self._answer(request) for request in done]

    def _answer(self, request: GenerateRequest) -> GenerateResult:
        cursor, start = request.prompt_cursor, request.start
        said = self.response(cursor, request.sample_index)
        assert request.input_ids == (7, 8, *said[:start])
        assert request.max_new_tokens is not None
        new = said[start : start + request.max_new_tokens]
        self.asked += len(new)
        reason = "stop" if new[-1] == STOP else "length"
        ids = torch.tensor(new, dtype=torch.int32)
        return GenerateResult(
            request.rid, ids, ids / -100, ((self.version, len(ids)),), reason, 2, text=str(new[0])
        )

    def response(self, cursor: int, sample: int) -> list[int]:
        return [3 + (cursor + i) % 50 for i in range(self.length(cursor, sample) - 1)] + [STOP]

    def wait(self, handles: Any, on_done: Any = None) -> list[Any]:
        return list(handles)

    async def result(self, handle: Any) -> Any:
        for _ in range(1 + self._order.randrange(20)):
            await asyncio.sleep(0)
        return handle

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None: ...


def rollouts(workers: Workers, verify: Any = judged) -> Rollouts:
    return Rollouts(EnginePool(workers), SingleTurn(CONFIG, TOKENIZER), verify)


def step_of(
    groups: PartialGroups, workers: Growing, step: int, verify: Any = judged, longest: int = 24
) -> Collected:
    workers.version = step - 1
    params = replace(PARAMS, step=step, max_new_tokens=longest)
    return asyncio.run(
        groups.collect(rollouts(workers, verify), params, lambda *_: None, lambda: None)
    )


def cursors(step: Collected, samples: int) -> list[int]:
    """Cursors of a step's groups; every group must be whole and in order."""
    keys = [(t.prompt.cursor, t.sample_index) for t in step.trajectories]
    found = sorted({cursor for cursor, _ in keys})
    assert keys == [(cursor, index) for cursor in found for index in range(samples)]
    return found


@pytest.mark.parametrize("capacity", [None, 3])
def test_steps_worked_by_hand(capacity: int | None) -> None:
    """Two groups a step of three under way, which grow by four tokens a round."""
    lengths = [9, 2, 5, 2, 1, 12, 1, 1, 1, 1, 1]
    workers = Growing(lambda cursor, sample: max(1, lengths[cursor] - sample), capacity)
    queue = PromptQueue(Numbered())
    groups = PartialGroups(queue, 2, 2, under_way=3, tokens=4)
    # 1 after a round, 2 after the second, when 0 has eight tokens
    one = step_of(groups, workers, 1)
    assert cursors(one, 2) == [1, 2]
    assert one.metrics == {
        "partial/rounds": 2,
        "partial/continued": 0,
        "partial/unfinished": 1,  # the second response of prompt 0 has eight tokens and is whole
        "partial/kept_tokens": 16,
    }
    assert queue.state() == {"cursor": 3}
    two = step_of(groups, workers, 2)  # 0 ends; 3 and 4 are begun and whole at once, and 4 waits
    assert cursors(two, 2) == [0, 3]
    assert [t.versions for t in two.trajectories] == [
        ((0, 8), (1, 1)),
        ((0, 8),),
        ((1, 2),),
        ((1, 1),),
    ]
    assert two.metrics["partial/continued"] == 1 / 4 and two.metrics["partial/kept_tokens"] == 2
    three = step_of(groups, workers, 3)  # 4 is older than 6, and 5 has four of its twelve tokens
    assert cursors(three, 2) == [4, 6]
    assert [t.versions for t in three.trajectories] == [((1, 1),)] * 2 + [((2, 1),)] * 2
    assert cursors(step_of(groups, workers, 4), 2) == [7, 8]
    five = step_of(groups, workers, 5)
    assert cursors(five, 2) == [5, 9]
    assert [t.versions for t in five.trajectories[:2]] == [((2, 4), (3, 4), (4, n)) for n in (4, 3)]


@pytest.mark.parametrize("capacity", [None, 3])
@pytest.mark.parametrize("seed", range(3))
def test_every_prompt_once_and_no_token_older_than_promised(
    seed: int, capacity: int | None
) -> None:
    rng = random.Random(seed)
    lengths = {
        (c, i): min(24, 1 + int(rng.lognormvariate(1.5, 1))) for c in range(300) for i in range(2)
    }
    tokens, most = rng.choice([3, 5, 8]), rng.choice([3, 5, 9])
    workers = Growing(lambda *which: lengths[which], capacity, engines=3, seed=seed)
    queue = PromptQueue(Numbered())
    groups = PartialGroups(queue, 3, 2, most, tokens)
    used: list[int] = []
    oldest = 0
    for step in range(1, 31):
        if rng.random() < 0.5:  # by way of a checkpoint
            kept, groups._under_way = groups.kept()(), []
            groups.restore(kept)
        batch = step_of(groups, workers, step)
        used += cursors(batch, 2)
        for t in batch.trajectories:
            assert t.tokens.tolist() == workers.response(t.prompt.cursor, t.sample_index)
            assert torch.equal(t.log_probs, t.tokens / -100)
            versions = [version for version, _ in t.versions]
            assert versions == sorted(set(versions)) and versions[-1] < step
            oldest = max(oldest, step - 1 - versions[0])
        assert len(used) == len(set(used)) == 3 * step
        waiting = {each[0].prompt.cursor for each in groups._under_way}
        assert waiting == set(range(queue.state()["cursor"])) - set(used)
    assert oldest <= -(-24 // tokens) - 1 + (most - 1) // 3
    assert (oldest > 0) == (most > 3)
    assert workers.asked == sum(lengths[c, i] for c in used for i in range(2)) + sum(
        each.tokens for group in groups._under_way for each in group
    )  # no token was sampled twice


def by_sample(answer_of: dict[int, list[float]]) -> Any:
    """Judges by the prompt, whose answer is its cursor, and the first token, which is the same for
    all samples: so by the order of verdicts within a prompt."""

    @contextlib.asynccontextmanager
    async def verify(answers: int):
        class Judge:
            judges_groups = False

            async def of(self, response: str, answer: str, *_: object) -> Verdict:
                return Verdict(answer_of[int(answer)].pop(), "ok")

        yield Judge()

    return verify


def test_groups_that_teach_nothing_are_dropped_and_others_begun_meanwhile() -> None:
    """One group a step of two under way. Prompts 0 and 1 are always solved; 0 takes three
    rounds."""
    flat, mixed = [1.0, 1.0], [1.0, 0.0]
    rewards = {0: flat, 1: flat, 2: flat, 3: mixed, 4: mixed}
    verify = by_sample({cursor: list(each) for cursor, each in rewards.items()})
    workers = Growing(lambda cursor, sample: 9 if cursor in (0, 3) else 2)
    queue = PromptQueue(Numbered())
    groups = PartialGroups(queue, 1, 2, under_way=2, tokens=4, refills=9)
    # 1 dropped, 2 begun and dropped, 3 begun; 0 dropped, 4 begun and whole
    one = step_of(groups, workers, 1, verify)
    assert cursors(one, 2) == [4]
    assert one.metrics["sampling/rounds"] == 4 and one.metrics["sampling/filled_up"] == 0
    assert one.metrics["sampling/dropped"] == 3 / 4
    assert one.metrics["sampling/reward_mean"] == (6 + 1) / 8
    assert one.metrics["sampling/waste"] == pytest.approx(1 - 4 / (18 + 4 + 4 + 4))
    assert one.metrics["partial/kept_tokens"] == 2 * 8 and queue.state() == {"cursor": 5}


def test_refills_are_bounded_and_dropped_groups_fill_the_step_up() -> None:
    verify = by_sample({cursor: [1.0, float(cursor != 3)] for cursor in range(9)})
    workers = Growing(lambda cursor, sample: 2)
    groups = PartialGroups(PromptQueue(Numbered()), 2, 2, under_way=2, tokens=4, refills=2)
    one = step_of(groups, workers, 1, verify)
    assert cursors(one, 2) == [0, 3]
    assert one.metrics["sampling/rounds"] == 2 and one.metrics["sampling/filled_up"] == 1


def test_a_token_of_other_weights_than_the_newest_is_refused_where_it_is_sampled() -> None:
    """Also in a response that is not trained on yet."""
    workers = Growing(lambda cursor, sample: 20)
    groups = PartialGroups(PromptQueue(Numbered()), 1, 2, under_way=1, tokens=4)
    workers.version = 1
    with pytest.raises(
        WeightVersionError,
        match="trainer holds version 0, but the rollout was sampled by version 1",
    ):
        asyncio.run(groups.collect(rollouts(workers), PARAMS, lambda *_: None, lambda: None))


def test_a_response_that_ends_for_want_of_context_is_whole() -> None:
    """An engine that gives fewer tokens than it was asked for, and says nothing but "length", gives
    no more."""

    class Short(Growing):
        def _answer(self, request: GenerateRequest) -> GenerateResult:
            assert request.start < 6, "asked to go on where there is no room"
            result = super()._answer(
                replace(request, max_new_tokens=min(request.max_new_tokens or 0, 6 - request.start))
            )
            return result

    workers = Short(lambda cursor, sample: 20)
    batch = step_of(PartialGroups(PromptQueue(Numbered()), 1, 2, under_way=1, tokens=4), workers, 1)
    assert [(len(t), t.finish_reason) for t in batch.trajectories] == [(6, "length")] * 2
    # the text is that of all tokens, and not of the last part's
    assert [t.text for t in batch.trajectories] == [
        TOKENIZER.decode(t.tokens.tolist(), skip_special_tokens=True) for t in batch.trajectories
    ]


class Fickle(Environment):
    """Says something else each time it is run."""

    runs = 0

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        Fickle.runs += 1
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, max_new_tokens=2))
        response.observed([9] * Fickle.runs)
        response.sampled(await generate(response.context))
        return response.trajectory()


class Forgetful(Fickle):
    """Asks no second time once it has been cut there."""

    async def run(self, prompt: Prompt, generate: Any) -> Any:
        Fickle.runs += 1
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, max_new_tokens=2))
        if Fickle.runs < 2:
            response.sampled(await generate(response.context))
        return response.trajectory()


@pytest.mark.parametrize("environment", [Fickle, Forgetful])
def test_an_environment_that_does_not_say_the_same_again_is_refused(
    environment: type[Fickle],
) -> None:
    Fickle.runs = 0
    engine = LocalEngine(str(MODEL))
    publish(engine, 0)
    made = Rollouts(EnginePool(Replicas([engine])), environment(CONFIG, TOKENIZER), judged)
    response = UnderWay(prompts(1)[0], 0, 1)
    asyncio.run(made.carry_on([response], PARAMS, tokens=4))
    assert response.trajectory is None and Fickle.runs == 1
    with pytest.raises(DataError, match="did not repeat its messages"):
        asyncio.run(made.carry_on([response], PARAMS, tokens=4))


def test_what_is_kept_comes_back_bit_for_bit() -> None:
    def same(one: Any, other: Any) -> bool:
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(
                one.view(torch.uint8), other.view(torch.uint8)
            )
        return one == other

    prompt = Prompt(7, "p-7", "2 + 2 = ?", "vier — 4", (5, 6), "sum")
    log_probs = torch.tensor([-0.1, -1e-30, 0.0, -17.25])
    experts = torch.arange(2 * 3 * 2, dtype=torch.uint8).view(2, 3, 2)
    done = sampled_trajectory(prompt, 0, [4, 9], [-0.5, -0.25], version=2)
    done.loss_mask, done.text, done.reward, done.reward_status = (
        torch.tensor([True, False]),
        "ünï\n",
        None,
        "timeout",
    )
    done.finish_reason, done.answer_at, done.experts = "length", 3, experts[:1]
    cut = UnderWay(prompt, 1, 3, context="abc", replica=1)
    cut.answers = [
        Answer(
            torch.tensor([3, 2**31 - 1], dtype=torch.int32),
            log_probs[:2],
            ((1, 2),),
            "stop",
            "x",
            experts,
        ),
        Answer(torch.tensor([8, 9], dtype=torch.int32), log_probs[2:], ((1, 1), (2, 1))),
    ]
    silent = UnderWay(
        replace(prompt, cursor=8),
        1,
        4,
        trajectory=sampled_trajectory(replace(prompt, cursor=8), 1, [], []),
    )
    groups: list[Any] = [
        [UnderWay(prompt, 0, 2, trajectory=done), cut],
        [UnderWay(replace(prompt, cursor=8), 0, 4), silent],
    ]
    data = to_bytes(groups)
    back = from_bytes(data)
    assert [[each.prompt for each in group] for group in back] == [
        [prompt] * 2,
        [replace(prompt, cursor=8)] * 2,
    ]
    (finished, continued), (begun, nothing) = back
    assert nothing.trajectory is not None and len(nothing.trajectory) == 0
    assert finished.trajectory is not None
    for name, value in vars(done).items():
        assert same(value, getattr(finished.trajectory, name)), name
    assert (continued.step, continued.sample_index, continued.context) == (3, 1, "abc")
    assert continued.replica is None  # replicas of another process
    for mine, answer in zip(continued.answers, cut.answers, strict=True):
        assert all(same(value, getattr(mine, name)) for name, value in vars(answer).items())
    assert (begun.step, begun.answers, begun.trajectory) == (4, [], None)
    assert to_bytes(back) == data and from_bytes(to_bytes([])) == []
    for damaged in (data[:-9], b"not one of ours", data.replace(b"log_probs", b"log_probz")):
        with pytest.raises(DataError, match="were under way cannot be read"):
            from_bytes(damaged)


def test_runs_of_versions_are_joined() -> None:
    runs: Sequence[Any] = [
        (((1, 2),), ((1, 3), (2, 1))),
        (((1, 2),), ((2, 3),)),
        ((), ((4, 1),)),
        (((4, 1),), ()),
    ]
    assert [joined(*each) for each in runs] == [
        ((1, 5), (2, 1)),
        ((1, 2), (2, 3)),
        ((4, 1),),
        ((4, 1),),
    ]
