"""Do environments of other projects train unchanged, and are the rewards theirs?

    pip install verifiers==0.4.0 datasets==5.2.0 reasoning-gym==0.1.25
    git clone https://github.com/PrimeIntellect-ai/verifiers
    python benchmarks/others_environments.py verifiers    # the clone

Three environments of the repository of `verifiers`, at COMMIT, and three tasks of `reasoning-gym`.
For each, a scripted player that is right half of the time, or makes random moves, plays episodes.
assets/tiny-chat learns from them (`megatron-stare sft`), so that rewards then differ within a
group, and trains for 20 steps on the environment. Every reward is computed again from the recorded
rollout alone: for `verifiers` by the environment's rules, written here a second time, and for
`reasoning-gym` by the task's own scorer.

Asked of each: every episode has a reward, every reward equals the one computed again, rewards
differ within a quarter of the groups, and a quarter of the steps has a gradient. A half was asked
at first, which scratchpad misses: its policy has learnt only some of the words.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from machine import machine
from transformers import AutoTokenizer

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import make_source
from megatron_stare.data.reasoning_gym import CHUNK, COLUMN
from megatron_stare.environments.environment import Turn, make_environment
from megatron_stare.records.batch import Prompt

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "assets/tiny-chat"
COMMIT = "a60a606ecc4d309247edf9ff92c3eabca362781f"  # of verifiers
STEPS = 20
TOKENIZER = AutoTokenizer.from_pretrained(MODEL)
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
OPENING = "<|im_start|>assistant\n"

VERIFIERS: dict[str, dict[str, Any]] = {
    "kuhn_poker": {"agent": "player0"},
    "scratchpad": {},
    "glossary": {},
}
GYM: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 12},
    "letter_counting": {"min_words": 2, "max_words": 3},
}


class Sizes(NamedTuple):
    """Sizes of a run. `episodes`: of the scripted player; `taught`: supervised steps of 8 of them.
    Each episode of glossary starts a tool server."""

    prompts: int
    samples: int
    episodes: int
    taught: int


SIZES = {
    "kuhn_poker": Sizes(2, 4, 80, 60),
    "scratchpad": Sizes(2, 8, 80, 160),
    "glossary": Sizes(2, 4, 30, 160),
    **dict.fromkeys(GYM, Sizes(4, 8, 1600, 160)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("clone", type=Path, help="a git clone of verifiers")
    parser.add_argument("--only", nargs="+", choices=[*VERIFIERS, *GYM], default=[*VERIFIERS, *GYM])
    args = parser.parse_args()
    out = ROOT / "benchmarks/results/others_environments.json"
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "-C", str(args.clone), "archive", COMMIT, "environments", "LICENSE"]
        packed = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=packed)
        environments = Path(folder) / "environments"
        make_importable(environments)
        origin = {
            "verifiers": {
                "version": version("verifiers"),
                "environments": COMMIT,
                "licence": (Path(folder) / "LICENSE").read_text().splitlines()[0],
            },
            "reasoning-gym": {"version": version("reasoning-gym"), "licence": "Apache-2.0"},
            "machine": machine(),
        }
        for name in args.only:
            run = train(name, environments, Path(folder) / name)
            found = json.loads(out.read_text()) if out.exists() else {"runs": {}}
            found = {**origin, "runs": {**found["runs"], name: run | {"asked": asked(run)}}}
            out.write_text(f"{json.dumps(found, indent=1)}\n")
            print(name, time.strftime("%H:%M:%S"), json.dumps(found["runs"][name]), flush=True)
    if not all(all(run["asked"].values()) for run in found["runs"].values()):
        sys.exit("not everything that is asked holds")


def make_importable(environments: Path) -> None:
    """Makes the environments' packages importable here and in the processes started from here,
    runs and tool servers."""
    folders = [str(ROOT), *(str(environments / name) for name in VERIFIERS)]
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])


def train(name: str, environments: Path, folder: Path) -> dict[str, Any]:
    """Teaches the model the scripted player's conversations, trains it, and judges the rewards.

    Args:
        environments: the folder of that name of the repository of `verifiers`, importable.
        folder: where the runs write.

    Raises:
        subprocess.CalledProcessError: a run failed.
    """
    folder.mkdir()
    conversations = folder / "conversations.jsonl"
    rows = played(name) if name in VERIFIERS else answered(name)
    conversations.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    start(
        "sft",
        folder / "sft",
        {
            "run": {"steps": SIZES[name].taught},
            "model": {"path": str(MODEL)},
            "data": {"path": str(conversations)},
            "batch": {"prompts": 8},
            "optimizer": {"lr": 1e-3, "warmup_steps": 5},
            "rollout": lengths(name),
        },
    )
    config = settings(name)
    config["model"]["path"] = str(folder / "sft/hf")
    config["run"] = {"steps": STEPS, "rollouts_every": 1, "rollouts_kept": 10_000}
    start("train", folder / "run", config)
    steps = [json.loads(line) for line in (folder / "run/metrics.jsonl").open()]
    rollouts = [
        json.loads(line)
        for file in sorted((folder / "run/rollouts").glob("*.jsonl"))
        for line in file.open()
    ]
    return judged(steps, rollouts, again(name, rollouts, environments))


def start(command: str, directory: Path, config: dict[str, Any]) -> None:
    """Runs a command of megatron-stare to its end."""
    config["run"] |= {"name": directory.name, "dir": str(directory)}
    config |= {"runtime": {"runner": "inline"}, "eval": {"prompts": 0}}
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    run = [sys.executable, "-m", "megatron_stare.cli", command, str(file)]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL, cwd=directory.parent)


def settings(name: str) -> dict[str, Any]:
    """Returns the configuration of the training run."""
    size = SIZES[name]
    made: dict[str, Any] = {
        "model": {"path": str(MODEL)},
        "batch": {"prompts": size.prompts, "samples_per_prompt": size.samples},
        "optimizer": {"lr": 1e-4},
        "rollout": lengths(name),
        "data": {"chat_template": True},
    }
    if name in VERIFIERS:
        made["data"]["source"] = "verifiers"
        made["reward"] = {"verifier": "environment"}
        made["rollout"]["environment"] = {"name": "verifiers", "taskset": name, **VERIFIERS[name]}
    else:
        source = {"name": "reasoning_gym", "dataset": name, "settings": GYM[name]}
        made["data"]["source"] = source
        made["reward"] = {"verifier": "reasoning_gym"}
    return made


def lengths(name: str) -> dict[str, int]:
    prompt, response = (1200, 400) if name in VERIFIERS else (600, 40)
    return {"max_prompt_tokens": prompt, "max_new_tokens": response}


class Player:
    """Says the right thing half of the time, or makes a random move, which may be illegal. Keeps
    what it read and said."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.read: list[str] = []

    def says(self, text: str) -> str:
        last = text.rsplit("<|im_start|>", 2)[-2]
        if result := re.search(r"<tool_response>\n(.*)\n</tool_response>", last, re.DOTALL):
            right = f"<answer>{result[1]}</answer>" if "<answer>" in text else result[1]
            return self._draw.choice([right, "I do not know"])
        if word := re.search(r'with word="(\w+)"', text):
            return call("scratchpad_roundtrip", word=word[1])
        if name := re.search(r'look up "([^"]+)"', text):
            return call("facts_lookup", name=name[1])
        moves = re.findall(r"\[(\w+)\] or \[(\w+)\]", last)[-1]
        return f"I [{self._draw.choice([*moves * 4, 'pass'])}]"

    async def __call__(self, context: Sequence[int], *_: Any, **__: Any) -> Turn:
        text = TOKENIZER.decode(list(context))
        said = self.says(text)
        ids = TOKENIZER(f"{said}<|im_end|>", add_special_tokens=False).input_ids
        self.read.append(f"{text}{said}<|im_end|>")
        tokens = torch.tensor(ids, dtype=torch.int32)
        return Turn(tokens, torch.full((len(ids),), -0.5), ((0, len(ids)),), "stop", said)

    async def call(self, tool: Any, request: Any, *, idempotent: bool = False) -> Any:
        raise AssertionError("the library calls its tools itself")


def call(tool: str, /, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def played(name: str) -> Iterator[dict[str, Any]]:
    """Yields the conversations of the scripted player as rows of `megatron-stare sft`, one for
    every agent of an episode."""
    config = Config.model_validate(settings(name))
    environment = make_environment(config.rollout.environment, config, TOKENIZER)
    prompts = make_source(config, TOKENIZER, "eval").take(SIZES[name].episodes)
    players = [Player(seed) for seed in range(len(prompts))]

    async def play() -> None:
        few = asyncio.Semaphore(8)

        async def episode(prompt: Prompt, player: Player) -> None:
            async with few:
                await environment.run(prompt, player)

        await asyncio.gather(*map(episode, prompts, players))

    try:
        asyncio.run(play())
    finally:
        environment.close()
    for player in players:
        # of turns that continue one another, the last one has all
        seats = {TURN.search(read)[0]: read for read in player.read}  # type: ignore[index]
        yield from map(conversation, seats.values())


def conversation(text: str) -> dict[str, Any]:
    """Reads the messages of a rendered conversation. They render as `text` again."""
    messages: list[dict[str, Any]] = []
    tools = []
    for role, said in TURN.findall(text):
        message: dict[str, Any] = {"role": role, "content": said}
        if role == "system" and said.startswith("<tools>"):
            tools = [json.loads(line) for line in said.splitlines()[1:-1]]
            continue
        if answer := re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", said, re.DOTALL):
            message = {"role": "tool", "content": answer[1]}
        if made := re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", said, re.DOTALL):
            calls = [{"type": "function", "function": json.loads(made[1])}]
            message = {"role": role, "content": "", "tool_calls": calls}
        messages.append(message)
    rendered = TOKENIZER.apply_chat_template(messages, tools=tools or None, tokenize=False)
    assert rendered.strip() == text.strip(), (rendered, text)
    return {"messages": messages} | ({"tools": tools} if tools else {})


def answered(name: str) -> Iterator[dict[str, Any]]:
    """Yields questions of a task of reasoning-gym, each with its own answer or another one's."""
    config = Config.model_validate(settings(name))
    prompts = make_source(config, TOKENIZER, "eval").take(SIZES[name].episodes)
    draw = random.Random(0)
    for prompt in prompts:
        answer = draw.choice([prompt, prompt, prompt, draw.choice(prompts)]).answer
        said = {"role": "assistant", "content": f"<answer>{answer}</answer>"}
        yield {"messages": [{"role": "user", "content": prompt.text}, said]}


def again(name: str, rollouts: Sequence[dict[str, Any]], environments: Path) -> list[float]:
    """Computes the rewards again, from the recorded prompts and responses."""
    if name == "kuhn_poker":
        return [poker(row["response"]) for row in rollouts]
    if name == "scratchpad":
        words = [re.findall(r'word="(\w+)"', row["prompt"])[0] for row in rollouts]
        return [
            float(word in last_reply(row["response"]))
            for word, row in zip(words, rollouts, strict=True)
        ]
    if name == "glossary":
        facts = json.loads((environments / "glossary/glossary/servers/facts.json").read_text())
        asked_for = [re.findall(r'look up "([^"]+)"', row["prompt"])[0] for row in rollouts]
        return [
            float(facts[entry.lower()].lower() in last_reply(row["response"]).lower())
            for entry, row in zip(asked_for, rollouts, strict=True)
        ]
    return [scored(name, prompt, row) for prompt, row in with_prompts(name, rollouts)]


def last_reply(response: str) -> str:
    """Returns the text of the last turn of the policy, without its tool calls."""
    return response.rpartition(OPENING)[2].partition("<tool_call>")[0]


def poker(response: str) -> float:
    """Plays a recorded hand of Kuhn poker again. Returns the chips that player 0 wins.

    Each player has paid one chip and may pay one more. A player who twice names no legal move, or
    more than one, forfeits what was paid before the hand."""
    cards, asks = ["", ""], [iter([""]), iter([""])]
    for talk in response.split("<|im_start|>system\n")[1:]:  # a player's, up to the turn
        seat = int(re.findall(r"as Player (\d)", talk)[0])
        cards[seat] = re.findall(r"private card: (\w)", talk)[0]
        asks[seat] = iter([each.partition("<|im_")[0] for each in talk.split(OPENING)[1:]])
    higher = 1 if "JQK".index(cards[0]) > "JQK".index(cards[1]) else -1
    paid, seat, moves = [1, 1], 0, 0
    while True:
        legal = {"check", "bet"} if paid[0] == paid[1] else {"fold", "call"}
        for _ in range(2):
            bracketed = re.findall(r"\[(\w+)\]", next(asks[seat], "").lower())
            named = [word for word in bracketed if word in legal]
            if len(named) == 1:
                break
        else:
            return 1.0 if seat else -1.0
        if named[0] == "fold":
            return float(paid[1] if seat else -paid[0])
        if named[0] == "call" or (named[0] == "check" and moves == 1):
            return float(higher * (2 if named[0] == "call" else 1))
        paid[seat] += named[0] == "bet"
        seat, moves = 1 - seat, moves + 1


def with_prompts(
    name: str, rollouts: Sequence[dict[str, Any]]
) -> Iterator[tuple[Prompt, dict[str, Any]]]:
    config = Config.model_validate(settings(name))
    prompts = make_source(config, TOKENIZER, "train").take(STEPS * SIZES[name].prompts)
    by_id = {prompt.id: prompt for prompt in prompts}
    for row in rollouts:
        yield by_id[row["id"]], row


def scored(name: str, prompt: Prompt, row: dict[str, Any]) -> float:
    """Asks the task's own scorer, about the text in the last <answer> of the response."""
    import reasoning_gym

    made_from = dict(prompt.columns or {})[COLUMN]
    task = reasoning_gym.create_dataset(name, seed=made_from["seed"], size=CHUNK, **GYM[name])
    entry = task[made_from["at"]]
    assert entry["question"] == row["prompt"]
    found = re.findall(r"<answer>(.*?)</answer>", row["response"], re.DOTALL)
    return float(task.score_answer(found[-1].strip() if found else None, entry))


def judged(
    steps: Sequence[dict[str, Any]], rollouts: Sequence[dict[str, Any]], rewards: Sequence[float]
) -> dict[str, Any]:
    """Returns the figures of a run."""
    equal = [row["reward"] == reward for row, reward in zip(rollouts, rewards, strict=True)]
    groups = groupby(rollouts, lambda row: (row["step"], row["id"]))
    differ = {key: len({row["reward"] for row in rows}) > 1 for key, rows in groups}
    norms = [row["optimizer/grad_norm"] for row in steps]
    means = [row["reward/mean"] for row in steps]
    return {
        "steps": len(steps),
        "rollouts": len(rollouts),
        "ok": sum(row["reward_status"] == "ok" for row in rollouts),
        "cut": sum(row["finish_reason"] == "length" for row in rollouts),
        "rewards": {
            str(value): sum(row["reward"] == value for row in rollouts)
            for value in sorted({row["reward"] for row in rollouts})
        },
        "recomputed_equal": sum(equal),
        "reward_first_5_steps": round(statistics.mean(means[:5]), 4),
        "reward_last_5_steps": round(statistics.mean(means[-5:]), 4),
        "groups": len(differ),
        "groups_with_different_rewards": sum(differ.values()),
        # where all of a group said the same, and only the other player's moves decided, the
        # advantages cancel up to rounding
        "steps_with_gradient": sum(norm > 1e-6 for norm in norms),
        "grad_norm_max": round(max(norms), 4),
        "logprob_diff_max": max(row["rollout/logprob_diff_max"] for row in steps),
    }


def asked(run: dict[str, Any]) -> dict[str, bool]:
    """Judges the figures of a run."""
    return {
        "it made 20 steps": run["steps"] == STEPS,
        "every episode has a reward": run["ok"] == run["rollouts"] > 0,
        "every reward equals the one computed again": run["recomputed_equal"] == run["rollouts"],
        "rewards differ in a quarter of the groups": 4 * run["groups_with_different_rewards"]
        >= run["groups"],
        "a quarter of the steps has a gradient": 4 * run["steps_with_gradient"] >= STEPS,
        "log-probs are the engine's": run["logprob_diff_max"] < 1e-4,
    }


if __name__ == "__main__":
    main()
