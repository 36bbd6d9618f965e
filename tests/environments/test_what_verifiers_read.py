"""A verifier reads what the policy sampled: no word of an environment earns a reward, however the
environment says it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.replicas import TOKENIZER, Replicas

from megatron_stare.config.schema import Config
from megatron_stare.environments.environment import Environment, Response
from megatron_stare.environments.single_turn import SingleTurn
from megatron_stare.evaluation.response import Response as Evaluated
from megatron_stare.observability.metrics.reflections import reflections
from megatron_stare.observability.metrics.reward_hacking import hacking_signals
from megatron_stare.records.batch import Prompt, SamplingParams
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory
from megatron_stare.rewards import arithmetic_verifier
from megatron_stare.rewards.verifier_pool import Verdict
from megatron_stare.rollout.engines.local import LocalEngine
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.sources.kept import from_bytes, to_bytes
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.rollout.sources.under_way import UnderWay

MODEL = Path(__file__).parents[2] / "assets" / "tiny-adder"
STOP = 1
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=24, seed=3, step=1, stop_token_ids=(STOP,))
CONFIG = Config.model_validate({"model": {"path": str(MODEL)}, "rollout": {"max_new_tokens": 24}})
RIGHT = "777"  # no sum of these prompts


class Tool(Environment):
    """Says the answer between two turns, and after them where that is asked for."""

    by_hand = last = empty = False

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        response = Response(prompt)
        response.sampled(await generate(prompt.token_ids, max_new_tokens=6))
        said = f"={RIGHT}"
        response.observed(
            () if self.empty else TOKENIZER(said, add_special_tokens=False).input_ids, text=said
        )
        if not self.last:
            response.sampled(await generate(response.context, max_new_tokens=6))
        made = response.trajectory()
        if self.by_hand:  # as an environment that puts its columns together by itself
            return Trajectory(
                prompt=prompt,
                sample_index=0,
                tokens=made.tokens,
                log_probs=made.log_probs,
                loss_mask=made.loss_mask,
                versions=made.versions,
                finish_reason=made.finish_reason,
                text=TOKENIZER.decode(made.tokens.tolist(), skip_special_tokens=True),
            )
        return made


class Reads:
    """Keeps what it is given, and judges it as the arithmetic verifier does."""

    def __init__(self) -> None:
        self.read: list[str] = []

    @contextlib.asynccontextmanager
    async def judged(self, answers: int):
        yield self

    judges_groups = False

    async def of(self, response: str, answer: str, *_: object) -> Verdict:
        self.read.append(response)
        reward = arithmetic_verifier.verify(response, RIGHT)
        return Verdict(reward, "ok", answer_at=arithmetic_verifier.answer_start(response))


def prompts(count: int = 4) -> list[Prompt]:
    texts = [f"{10 + 7 * i}+{99 - i}+{20 + i}=" for i in range(count)]
    return [
        Prompt(40 + i, str(i), t, str(i), tuple(TOKENIZER(t).input_ids))
        for i, t in enumerate(texts)
    ]


def rollouts(environment: Environment, reads: Reads) -> Rollouts:
    engine = LocalEngine(str(MODEL), 8)
    engine.begin_weight_update(0)
    engine.update_weights(list(load_file(MODEL / "model.safetensors").items()))
    engine.end_weight_update()
    return Rollouts(EnginePool(Replicas([engine])), environment, reads.judged)


@pytest.mark.parametrize("how", ["response", "by_hand", "last", "empty"])
def test_what_a_tool_says_earns_nothing(how: str) -> None:
    environment, reads = Tool(CONFIG, TOKENIZER), Reads()
    if how != "response":
        setattr(environment, how, True)
    made = rollouts(environment, reads).make(prompts(), 3, PARAMS)
    assert len(reads.read) == len(made) == 12
    assert not any(RIGHT in read for read in reads.read)
    assert {trajectory.reward for trajectory in made} == {0.0}
    for trajectory in made:
        turns, end = [], 0
        for version, n in trajectory.versions:
            if version != NOT_SAMPLED:
                turns.append(
                    TOKENIZER.decode(
                        [i for i in trajectory.tokens[end : end + n].tolist() if i != STOP]
                    )
                )
            end += n
        assert trajectory.said == ("" if how == "empty" else "\n").join(turns)
        assert f"={RIGHT}" in trajectory.text  # people read it
    assert sorted(reads.read) == sorted(trajectory.said for trajectory in made)


def test_stop_tokens_are_no_text_though_they_are_not_special_to_the_tokenizer() -> None:
    """Verifiers read no stop token of any turn, be it one of several or a single one."""
    reads = Reads()
    (stop,) = TOKENIZER(";", add_special_tokens=False).input_ids
    made = rollouts(Tool(CONFIG, TOKENIZER), reads).make(
        prompts(), 3, replace(PARAMS, stop_token_ids=(STOP, stop))
    )
    assert any(";" in trajectory.text or stop in trajectory.tokens.tolist() for trajectory in made)
    assert not any(";" in read for read in reads.read)


def test_what_is_counted_of_a_text_is_counted_of_the_policys() -> None:
    """Only the policy's text counts: for an answer's place, reflections, and what an evaluation
    keeps and compares."""
    environment, reads = Tool(CONFIG, TOKENIZER), Reads()
    (made,) = rollouts(environment, reads).make(prompts(1), 1, PARAMS)
    assert Evaluated.of(made).text == made.said != made.text
    word = replace(made, text="wait " * 9 + made.text)
    assert reflections([word], ["wait"]) == {"response/reflections": 0.0}
    observed = len(TOKENIZER(f"={RIGHT}").input_ids)
    assert (made.versions[1], len(made)) == (
        (NOT_SAMPLED, observed),
        sum(n for _, n in made.versions),
    )
    # an answer at the end of what was sampled, behind 20 characters of it: six tokens and six are
    # before it, not ten
    right = replace(made, sampled_text="x" * 20, answer_at=19, reward=1.0, reward_status="ok")
    few = replace(right, answer_at=10)  # half of the sampled tokens, at most 6, stand before it
    assert hacking_signals([few])["signal/no_reasoning"] == 1.0
    sampled = len(made) - observed
    assert hacking_signals([right])["signal/no_reasoning"] == float(sampled * 19 / 20 < 8)


def test_a_single_turn_keeps_its_text_once() -> None:
    """Most responses are single turns: nothing is decoded again, and a checkpoint holds one
    text."""
    reads = Reads()
    made = rollouts(SingleTurn(CONFIG, TOKENIZER), reads).make(prompts(), 2, PARAMS)
    assert all(
        trajectory.sampled_text is None and trajectory.said == trajectory.text
        for trajectory in made
    )
    assert sorted(reads.read) == sorted(trajectory.text for trajectory in made)


def test_a_response_cut_and_kept_is_judged_by_the_same_text() -> None:
    uncut, cut = Reads(), Reads()
    whole = rollouts(Tool(CONFIG, TOKENIZER), uncut).make(prompts(2), 2, PARAMS)
    made = rollouts(Tool(CONFIG, TOKENIZER), cut)
    groups = [[UnderWay(prompt, index, PARAMS.step) for index in range(2)] for prompt in prompts(2)]
    while unfinished := [each for group in groups for each in group if each.trajectory is None]:
        asyncio.run(made.carry_on(unfinished, PARAMS, tokens=4))
        groups = from_bytes(to_bytes(groups))
    for one, response in zip(whole, (each for group in groups for each in group), strict=True):
        assert response.trajectory is not None
        assert torch.equal(response.trajectory.tokens, one.tokens)
        assert (response.trajectory.said, response.trajectory.text) == (one.said, one.text)
    assert sorted(cut.read) == sorted(uncut.read)
