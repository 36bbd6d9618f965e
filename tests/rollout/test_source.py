"""From prompts to verified trajectories: real engines in process, environments of one turn and of
two."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.check_again import CheckAgain
from safetensors.torch import load_file
from support.replicas import Replicas, Stream

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Response, make_environment
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.errors import ConfigError, DataError, WeightVersionError
from megatron_stare.process.workers import Workers
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory, sampled_trajectory
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.engine import GenerateRequest, GenerateResult, check_params
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.engines.model_folder import load_tokenizer
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.group_sampling import EveryGroup
from megatron_stare.rollout.sources.rollout_source import Rollouts, check_trajectory
from megatron_stare.rollout.sources.synchronous_source import SynchronousSource
from megatron_stare.rollout.sources.turns import check_result, check_versions

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
STOP, SEMICOLON = 1, 15
TOKENIZER = load_tokenizer(str(MODEL))
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=2, stop_token_ids=(STOP,))
CONFIG = Config.model_validate({"model": {"path": str(MODEL)}, "rollout": {"max_new_tokens": 24}})


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return TOKENIZER


def local_engine(max_batch: int = 256, version: int = 5) -> LocalEngine:
    engine = LocalEngine(str(MODEL), max_batch)
    engine.begin_weight_update(version)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()
    return engine


class LengthJudge:
    """Rewards the length of the text: enough to see that each answer got its own verdict."""

    judges_groups = False

    async def of(self, response: str, answer: str, *_: object) -> Verdict:
        await asyncio.sleep(0)
        return Verdict(float(len(response)), "ok", answer_at=len(answer))


@contextlib.asynccontextmanager
async def by_length(answers: int):
    yield LengthJudge()


def rollouts(workers: Workers, environment: Environment) -> Rollouts:
    return Rollouts(EnginePool(workers), environment, by_length)


def prompts(tokenizer: Any, count: int) -> list[Prompt]:
    texts = [f"{10 + 7 * i}+{99 - i}+{20 + i}=" for i in range(count)]
    return [
        Prompt(40 + i, str(i), t, str(i), tuple(tokenizer(t).input_ids))
        for i, t in enumerate(texts)
    ]


@pytest.mark.parametrize(("engines", "max_batch"), [(1, 256), (1, 5), (3, 4)])
def test_single_turns_are_what_the_engine_says(tokenizer, engines, max_batch):
    """Bit for bit what contiguous shards, cut into batches, give when an engine is asked for them
    by itself."""
    wanted = prompts(tokenizer, 5)
    workers = Replicas([local_engine(max_batch) for _ in range(engines)])
    seen: list[tuple[int, int]] = []
    made = rollouts(workers, SingleTurn(CONFIG, tokenizer)).make(
        wanted,
        4,
        replace(PARAMS, max_new_tokens=20),
        lambda done, total: seen.append((done, total)),
    )
    assert [(t.prompt.cursor, t.sample_index) for t in made] == [
        (40 + p, i) for p in range(5) for i in range(4)
    ]
    assert seen == [(done, 20) for done in range(21)]
    requests = [
        GenerateRequest(f"{p.cursor}:{i}", p.token_ids, p.cursor, i)
        for p in wanted
        for i in range(4)
    ]
    bounds = [20 * n // engines for n in range(engines + 1)]
    reference = local_engine(max_batch)
    shards = [requests[bounds[n] : bounds[n + 1]] for n in range(engines)]
    expected = [
        r for shard in shards for r in reference.generate(shard, replace(PARAMS, max_new_tokens=20))
    ]
    for trajectory, result in zip(made, expected, strict=True):
        assert torch.equal(trajectory.tokens, result.output_ids)
        assert torch.equal(trajectory.log_probs, result.output_log_probs)
        assert trajectory.loss_mask.all()
        assert trajectory.versions == ((5, len(result.output_ids)),)
        assert trajectory.finish_reason == result.finish_reason
        assert trajectory.text == tokenizer.decode(
            [i for i in result.output_ids.tolist() if i != STOP]
        )
        assert (trajectory.reward, trajectory.reward_status) == (float(len(trajectory.text)), "ok")
        assert trajectory.answer_at == len(trajectory.prompt.answer)
    assert {t.finish_reason for t in made} == {"stop", "length"}


def test_a_second_turn_goes_on_where_the_first_ended(tokenizer):
    wanted = prompts(tokenizer, 6)
    made = rollouts(Replicas([local_engine()]), CheckAgain(CONFIG, tokenizer)).make(
        wanted, 2, PARAMS
    )
    said = tokenizer(";0+").input_ids
    for trajectory in made:
        (first, observed, *second) = [tokens for _, tokens in trajectory.versions]
        assert [version for version, _ in trajectory.versions][:2] == [5, NOT_SAMPLED]
        assert first <= 12 and observed == len(said)
        assert trajectory.tokens[first : first + observed].tolist() == said
        assert trajectory.loss_mask.tolist() == [True] * first + [False] * observed + [True] * sum(
            second
        )
        assert not trajectory.log_probs[first : first + observed].any()
        assert len(trajectory) <= 24
        assert trajectory.text.count(";0+") >= 1
    assert sum(len(t.versions) == 3 for t in made) > 6
    # the second turn's log-probs are those of the policy after all that stands before them
    engine, alone = local_engine(), made[0]
    start = sum(tokens for _, tokens in alone.versions[:2])
    request = GenerateRequest(
        "again",
        (*alone.prompt.token_ids, *alone.tokens[:start].tolist()),
        alone.prompt.cursor,
        0,
        start,
        24 - start,
    )
    (again,) = engine.generate([request], PARAMS)
    assert torch.equal(again.output_ids, alone.tokens[start:])
    torch.testing.assert_close(again.output_log_probs, alone.log_probs[start:], atol=1e-5, rtol=0)


def test_which_replica_is_faster_does_not_matter(tokenizer):
    wanted, environment = prompts(tokenizer, 4), CheckAgain(CONFIG, tokenizer)
    given, found = [], []
    for seed in range(3):
        workers = Replicas([local_engine(4), local_engine(4)], seed)
        found.append(rollouts(workers, environment).make(wanted, 3, PARAMS))
        given.append(workers.given)
    assert given[0] == given[1] == given[2]
    assert all(len(calls) >= 2 for calls in given[0])  # both turns came to both
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.log_probs, b.log_probs)


class Slots(LocalEngine):
    """Takes two requests at a time and answers one a call, as a server whose responses differ in
    length."""

    def model_info(self) -> Any:
        return replace(super().model_info(), capacity=2)

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        super().submit(requests, params)
        assert len(self._waiting) <= 2, "more than it has room for"


def slots() -> Slots:
    engine = Slots(str(MODEL), 1)
    engine.begin_weight_update(5)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()
    return engine


def test_requests_go_where_there_is_room_and_each_is_answered_once(tokenizer):
    wanted = prompts(tokenizer, 5)
    workers = Replicas([slots(), slots()], seed=1)
    made = rollouts(workers, CheckAgain(CONFIG, tokenizer)).make(wanted, 2, PARAMS)
    given = [rid for calls in workers.given for call in calls for rid in call]
    assert len(given) == len(set(given))
    assert min(sum(map(len, calls)) for calls in workers.given) >= 4  # of 20
    together = rollouts(Replicas([local_engine()]), CheckAgain(CONFIG, tokenizer)).make(
        wanted, 2, PARAMS
    )
    for a, b in zip(made, together, strict=True):
        assert torch.equal(a.tokens, b.tokens)  # noise is keyed on the request, whoever answers it


class Breaks(LocalEngine):
    """Answers wrongly in a way that is set."""

    def collect(self, wait_s: float) -> list[GenerateResult]:
        results = super().collect(wait_s)
        if self.how == "error":
            raise DataError("the engine has had enough")
        if self.how == "unknown":
            return [replace(result, rid="nobody") for result in results]
        return [
            replace(result, output_log_probs=result.output_log_probs[:-1]) for result in results
        ]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("error", "has had enough"),
        ("unknown", "a request that it was not sent"),
        ("short", "log-probs and weight versions"),
    ],
)
def test_a_replica_that_breaks_its_contract_ends_the_rollout(tokenizer, caplog, how, message):
    engine = Breaks(str(MODEL))
    engine.how = how
    engine.begin_weight_update(5)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()
    workers = Replicas([local_engine(), engine])
    with pytest.raises(DataError, match=message):
        rollouts(workers, SingleTurn(CONFIG, tokenizer)).make(prompts(tokenizer, 4), 2, PARAMS)
    assert workers.aborted == 2  # nothing that was asked for is answered to the next rollout
    gc.collect()
    # asyncio's, of errors that nobody asked for
    assert [record.getMessage() for record in caplog.records] == []


class Talks(Environment):
    """Says more than the run allows, or marks what it says as sampled."""

    how = ""

    async def run(self, prompt, generate):
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids))
        if self.how == "forgets the prompt":
            await generate(prompt.token_ids[1:])
        response.observed([SEMICOLON] * (30 if self.how == "long" else 1))
        trajectory = response.trajectory()
        if self.how == "marks":
            trajectory.loss_mask[-1] = True
        if self.how == "loses":
            trajectory.log_probs = trajectory.log_probs[:-1]
        return trajectory


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("long", "the run allows 24"),
        ("marks", "a token that no weights sampled carries loss"),
        ("loses", "has log-probs of"),
        ("forgets the prompt", "does not begin with the prompt"),
    ],
)
def test_an_environment_that_breaks_its_contract_is_named(tokenizer, how, message):
    environment = Talks(CONFIG, tokenizer)
    environment.how = how
    with pytest.raises(DataError, match=message):
        rollouts(Replicas([local_engine()]), environment).make(
            prompts(tokenizer, 2), 2, replace(PARAMS, max_new_tokens=24)
        )


def test_a_turn_without_room_is_empty(tokenizer):
    """The first turn may fill the response: the second then gives no token, and says why."""
    turns = []

    class Twice(Environment):
        async def run(self, prompt, generate):
            response = Response(prompt)
            response.sampled(await generate(prompt.token_ids))
            turns.append(await generate(response.context))
            return response.trajectory()

    params = replace(PARAMS, max_new_tokens=3, stop_token_ids=())
    made = rollouts(Replicas([local_engine()]), Twice(CONFIG, tokenizer)).make(
        prompts(tokenizer, 2), 2, params
    )
    assert [len(t) for t in made] == [3] * 4
    assert {(len(turn.tokens), turn.finish_reason, turn.text) for turn in turns} == {
        (0, "length", "")
    }


def test_training_samples_from_the_whole_distribution(tokenizer):
    for wrong in (replace(PARAMS, top_p=0.9), replace(PARAMS, greedy=True)):
        stream = Stream(prompts(tokenizer, 4))
        made = rollouts(Replicas([local_engine()]), SingleTurn(CONFIG, tokenizer))
        source = SynchronousSource(
            made, EveryGroup(stream, 2, 2), lambda step, params=wrong: params, dict
        )
        source.version = 5
        with pytest.raises(ValueError, match="whole distribution"):
            source.next(1)
        assert len(stream.left) == 4


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.5])
def test_a_support_that_cannot_be_cut_like_that(top_p):
    with pytest.raises(ConfigError, match="no tokens together"):
        check_params(replace(PARAMS, top_p=top_p))
    check_params(replace(PARAMS, top_p=0.1))


def test_environments_are_found_by_name_and_checked(tokenizer):
    assert isinstance(make_environment("single_turn", CONFIG, tokenizer), SingleTurn)
    assert isinstance(
        make_environment("environments.check_again.CheckAgain", CONFIG, tokenizer), CheckAgain
    )
    with pytest.raises(ConfigError, match="did you mean 'single_turn'"):
        make_environment("single_turns", CONFIG, tokenizer)
    with pytest.raises(ConfigError, match="not a subclass"):
        make_environment("collections.OrderedDict", CONFIG, tokenizer)


def result(ids: list[int], **changes: Any) -> GenerateResult:
    fields: dict[str, Any] = {
        "rid": "5:0",
        "output_ids": torch.tensor(ids, dtype=torch.int32),
        "output_log_probs": torch.full((len(ids),), -0.5),
        "versions": ((2, len(ids)),),
        "finish_reason": "stop",
        "prompt_tokens": 2,
    }
    return GenerateResult(**fields | changes)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (result([2, 3]), r"its last token \[3\] is no stop token"),
        (result([]), "no stop token"),
        (
            result([2, STOP], output_log_probs=torch.zeros(1)),
            "2 tokens, 1 log-probs and weight versions of 2",
        ),
        (result([2, STOP], versions=((2, 1),)), "weight versions of 1"),
    ],
)
def test_a_result_that_breaks_the_contract_is_refused(broken, message):
    check_result(result([2, STOP]), (STOP,))
    with pytest.raises(DataError, match=message):
        check_result(broken, (STOP,))


def test_every_sampled_token_must_be_of_the_expected_version():
    def of(*runs: tuple[int, int]) -> Trajectory:
        made = sampled_trajectory(
            Prompt(0, "0", "", ""),
            0,
            [3] * sum(n for _, n in runs),
            [0.0] * sum(n for _, n in runs),
        )
        made.versions = runs
        made.loss_mask = torch.cat([torch.full((n,), v != NOT_SAMPLED) for v, n in runs])
        check_trajectory(made, 10, 100)
        return made

    check_versions([of((2, 3)), of((2, 1), (NOT_SAMPLED, 4), (2, 2))], 2)
    with pytest.raises(
        WeightVersionError, match=r"holds version 2, .* version 1: 1 tokens, version 2: 4 tokens"
    ) as error:
        check_versions([of((2, 2)), of((1, 1), (2, 2))], 2)
    assert "sync the weights" in str(error.value)
    with pytest.raises(WeightVersionError):
        check_versions([of((2, 2))], 3)
