"""Environments of the library `verifiers`, unchanged: their episodes become responses, their
rewards are kept, and runs train on them.

pip install verifiers==0.4.0 datasets    into an environment that has this project

The environments are those of the library's repository (github.com/PrimeIntellect-ai/verifiers,
commit a60a606ecc4d309247edf9ff92c3eabca362781f, MIT licence), which no package index has. Fetch it
and name its folder `environments` in MEGATRON_STARE_VERIFIERS.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.runs import ROOT, metrics, train
from transformers import AutoTokenizer

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import make_source
from megatron_stare.environments.environment import Environment, Turn, make_environment
from megatron_stare.environments.verifiers_library import Verifiers
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Branch, Trajectory
from megatron_stare.rollout.sources.rollout_source import check_trajectory
from megatron_stare.rollout.sources.under_way import ResponseCut

sys.path.insert(0, str(ROOT / "benchmarks"))

import others_environments
from others_environments import call

pytestmark = pytest.mark.slow
pytest.importorskip("verifiers")
CHAT = ROOT / "assets/tiny-chat"
TOKENIZER = AutoTokenizer.from_pretrained(CHAT)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
FOLDER = Path(os.environ.get("MEGATRON_STARE_VERIFIERS", ""))
NAMES = ("kuhn_poker", "scratchpad", "glossary")
if not (FOLDER / "kuhn_poker").is_dir():
    pytest.skip("MEGATRON_STARE_VERIFIERS names no environments", allow_module_level=True)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here and in the tool servers, which are processes of their own."""
    folders = [str(FOLDER / name) for name in (*NAMES, "reverse_text")]
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    both = os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", both)


def config(taskset: str, limit: int = 1500, **environment: Any) -> Config:
    if taskset == "kuhn_poker":
        environment.setdefault("agent", "player0")
    return Config.model_validate(
        {
            "model": {"path": str(CHAT)},
            "data": {"source": "verifiers", "chat_template": True},
            "reward": {"verifier": "environment"},
            "rollout": {
                "max_new_tokens": limit,
                "max_prompt_tokens": 2000,
                "environment": {"name": "verifiers", "taskset": taskset, **environment},
            },
        }
    )


def prompts(made: Config, number: int) -> list[Prompt]:
    return make_source(made, TOKENIZER, "train").take(number)


class Policy:
    """Plays each environment right or wrong, and keeps what was asked and said."""

    def __init__(self, right: bool) -> None:
        self.right = right
        self.turns: list[tuple[tuple[int, ...], list[int]]] = []

    def says(self, text: str) -> str:
        last = text.rsplit("<|im_start|>", 2)[-2]
        if found := re.search(r"<tool_response>\n(.*)\n</tool_response>", last, re.DOTALL):
            return found.group(1) if self.right else "nothing"
        if asked := re.search(r'with word="(\w+)"', text):
            return call("scratchpad_roundtrip", word=asked.group(1))
        if asked := re.search(r'look up "([^"]+)"', text):
            return call("facts_lookup", name=asked.group(1))
        if not self.right:
            return "I do not know"
        return "I [check]" if "[check]" in last else "I [call]"

    async def __call__(
        self,
        context: Sequence[int],
        max_new_tokens: int | None = None,
        stop: Any = (),
        branch: Branch | None = None,
    ) -> Turn:
        said = self.says(TOKENIZER.decode(list(context)))
        ids = [*TOKENIZER(said, add_special_tokens=False).input_ids, END]
        self.turns.append((tuple(context), ids))
        tokens = torch.tensor(ids, dtype=torch.int32)
        return Turn(tokens, torch.full((len(ids),), -0.5), ((0, len(ids)),), "stop", said)

    async def call(self, tool: Any, request: Any, *, idempotent: bool = False) -> Any:
        raise AssertionError("the library calls its tools itself")


def play(environment: Environment, of: Sequence[Prompt], right: bool) -> list[Trajectory]:
    """Plays the prompts at the same time, in an event loop as short as a step's."""

    async def all_of_them() -> list[Trajectory]:
        return await asyncio.gather(*(environment.run(each, Policy(right)) for each in of))

    return asyncio.run(all_of_them())


def reward(taskset: str, prompt: Prompt, right: bool) -> float:
    """Computes a reward again, from the environment's rules alone."""
    if taskset != "kuhn_poker":
        return float(right)
    if not right:
        return -1.0  # the first player forfeits
    at = prompt.columns["verifiers"]["at"]  # type: ignore[index]
    cards = random.Random(at).sample(["J", "Q", "K"], 2)
    ranks = "JQK"
    return 1.0 if ranks.index(cards[0]) > ranks.index(cards[1]) else -1.0


@pytest.mark.parametrize("taskset", NAMES)
def test_rewards_and_tokens_are_those_of_the_environment(taskset: str) -> None:
    made = config(taskset)
    environment = make_environment(made.rollout.environment, made, TOKENIZER)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        for right in (True, False, True):
            of = prompts(made, 4)
            for prompt, found in zip(of, play(environment, of, right), strict=True):
                check_trajectory(found, 1500, 3500)
                assert (found.reward_status, found.verdict_detail) == ("ok", "")
                assert found.reward == reward(taskset, prompt, right), found.text
                assert found.loss_mask.any() and found.finish_reason == "stop"
        assert [thread.name for thread in threading.enumerate()].count("verifiers") == 1
    finally:
        environment.close()
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


def test_a_conversation_with_tools_continues_from_the_sampled_tokens() -> None:
    """One branch: the tool's answer stands between two turns, and no token is encoded again."""
    made, policy = config("scratchpad"), Policy(True)
    environment = make_environment(made.rollout.environment, made, TOKENIZER)
    try:
        found = asyncio.run(environment.run(prompts(made, 1)[0], policy))
    finally:
        environment.close()
    (first, said), (second, _) = policy.turns
    assert second[: len(first) + len(said)] == (*first, *said)
    assert [branch.start for branch in found.branches] == [0]
    assert found.tokens[found.loss_mask].tolist() == [*said, *policy.turns[1][1]]


def test_two_environments_play_at_once() -> None:
    """A run and its evaluation may have an environment each."""
    both = [config("kuhn_poker"), config("scratchpad")]
    made = [make_environment(each.rollout.environment, each, TOKENIZER) for each in both]

    async def played() -> list[Trajectory]:
        return await asyncio.gather(
            *(
                environment.run(prompt, Policy(True))
                for environment, of in zip(made, both, strict=True)
                for prompt in prompts(of, 8)
            )
        )

    try:
        for _ in range(2):
            assert {each.verdict_detail for each in asyncio.run(played())} == {""}
            made[0].close()  # starts again when it is asked
    finally:
        for environment in made:
            environment.close()


def test_the_other_agent_is_played_and_not_trained() -> None:
    made, policy = config("kuhn_poker", agent="player1"), Policy(True)
    environment = make_environment(made.rollout.environment, made, TOKENIZER)
    try:
        found = asyncio.run(environment.run(prompts(made, 1)[0], policy))
    finally:
        environment.close()
    assert len(policy.turns) == 2
    assert found.tokens[found.loss_mask].tolist() == policy.turns[1][1]


def test_a_cut_response_repeats_its_turns() -> None:
    """A cut reaches the rollouts as it is. The environment then runs again, asks the same and goes
    on, in another event loop."""
    made = config("glossary")
    environment = make_environment(made.rollout.environment, made, TOKENIZER)
    prompt, cut, whole = prompts(made, 1)[0], Policy(True), Policy(True)

    class Cut(Policy):
        async def __call__(self, context: Sequence[int], *args: Any, **kwargs: Any) -> Turn:
            if cut.turns:
                raise ResponseCut
            return await cut(context, *args, **kwargs)

    try:
        with pytest.raises(ResponseCut):
            asyncio.run(environment.run(prompt, Cut(True)))
        found = asyncio.run(environment.run(prompt, whole))
    finally:
        environment.close()
    assert cut.turns == whole.turns[:1] and len(whole.turns) == 2 and found.reward == 1.0


def test_a_cancelled_response_leaves_nothing() -> None:
    made = config("glossary")
    environment = make_environment(made.rollout.environment, made, TOKENIZER)
    asked = asyncio.Event()

    async def waits(*_: Any, **__: Any) -> Turn:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def cancelled() -> None:
        running = asyncio.create_task(environment.run(prompts(made, 1)[0], waits))  # type: ignore[arg-type]
        await asked.wait()
        children = psutil.Process().children(recursive=True)
        assert children
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        gone, alive = psutil.wait_procs(children, timeout=20)
        assert gone and not alive

    try:
        asyncio.run(cancelled())
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"taskset": "kuhn_poker", "agent": None}, "has the agents player0, player1"),
        ({"taskset": "scratchpad", "agent": "player0"}, "has no agent 'player0'"),
        ({"taskset": "no_such_taskset"}, "cannot be made"),
        ({"taskset": "scratchpad", "settings": {"nothing": 1}}, "cannot be made"),
        (
            {"taskset": "scratchpad", "settings": {"agent": {"harness": {"id": "bash"}}}},
            "runs programs of the policy",
        ),
    ],
)
def test_what_cannot_be_played_is_refused(changes: dict[str, Any], said: str) -> None:
    made = config(**changes)
    with pytest.raises(ConfigError, match=said):
        make_environment(made.rollout.environment, made, TOKENIZER)


def test_tasks_come_once_an_epoch_and_evaluations_have_their_own() -> None:
    finite, endless = config("scratchpad"), config("kuhn_poker")
    taken = [each.columns["verifiers"]["at"] for each in prompts(finite, 40)]  # type: ignore[index]
    assert sorted(taken[:20]) == sorted(taken[20:]) == list(range(20))
    assert taken[:20] != taken[20:] != list(range(20))
    held = make_source(endless, TOKENIZER, "eval").take(5)
    trained = prompts(endless, 5)
    assert not {each.problem for each in held} & {each.problem for each in trained}


@pytest.mark.parametrize("taskset", NAMES)
def test_a_run_trains(taskset: str, tmp_path: Path) -> None:
    """20 steps; the rewards are those of the environment's rules, computed again."""
    found = others_environments.train(taskset, FOLDER, tmp_path / taskset)
    assert all(others_environments.asked(found).values()), found


def test_a_run_trains_on_an_environment_with_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()  # the environment's own is on a hub
    rows = [json.dumps({"prompt": word * 2}) for word in ("ab", "cd", "ef", "gh", "ij")]
    (tmp_path / "texts/train.jsonl").write_text("\n".join(rows))
    settings = {"taskset": {"dataset_name": str(tmp_path / "texts")}}
    made = config("reverse_text", 96, settings=settings)
    assert isinstance(make_environment(made.rollout.environment, made, TOKENIZER), Verifiers)
    done = train(
        f"model.path={CHAT}",
        cwd=tmp_path,
        **{
            "run.dir": tmp_path / "run",
            "run.rollouts_every": 1,
            "runtime.runner": "inline",
            "parallel.tensor": 1,
            "data.source": "verifiers",
            "data.chat_template": "true",
            "rollout.environment": json.dumps(
                {"name": "verifiers", **made.rollout.environment.settings}
            ),
            "rollout.max_new_tokens": 96,
            "rollout.max_prompt_tokens": 1400,
            "reward.verifier": "environment",
            "batch.samples_per_prompt": 2,
            "eval.prompts": 0,
        },
    )
    assert done.returncode == 0, done.stderr
    assert max(row["rollout/logprob_diff_max"] for row in metrics(tmp_path / "run")) < 1e-4
    for file in sorted(tmp_path.glob("run/rollouts/*.jsonl")):
        assert all(json.loads(row)["reward_status"] == "ok" for row in file.open())
