"""Verifiers that read columns of the data, and verifiers that judge all responses to a prompt."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

from megatron_stare.config.schema import Config
from megatron_stare.data.records import read_records
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import Trajectory
from megatron_stare.registry import Extension
from megatron_stare.rewards.known_answers import open_pool
from megatron_stare.rewards.verdicts import verdicts
from megatron_stare.rewards.verifier import asked_by, make_verifier, rewards_of
from megatron_stare.rewards.verifier_pool import TooManyFailuresError, VerifierPool
from megatron_stare.rollout.sources.rollout_source import _Judging
from megatron_stare.train import train

ROOT = Path(__file__).parents[2]
HERE = "support.given_verifiers"


def test_what_a_verifier_asks_for_is_read_from_its_parameters() -> None:
    asked = {
        name: asked_by(make_verifier(f"{HERE}.{name}")) for name in ("within", "maybe", "rarest")
    }
    found = {name: (each.groups, each.columns, each.needs_columns) for name, each in asked.items()}
    assert found == {
        "within": (False, True, True),
        "maybe": (False, True, False),
        "rarest": (True, True, False),
    }
    added = asked_by(make_verifier(f"{HERE}.within + 0.5 * {HERE}.rarest"))
    assert (added.groups, added.needs_columns) == (True, True)


def test_a_callable_that_cannot_be_hashed_is_a_verifier_too() -> None:
    class Longer:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, response: str, answer: str) -> float:
            return float(len(response) > len(answer))

    assert rewards_of(Longer(), ["ab", "a"], "b") == [1.0, 0.0]


def test_columns_are_no_setting_and_others_are() -> None:
    verify = make_verifier(Extension(f"{HERE}.within", {"bonus": 0.5}))
    assert rewards_of(verify, ["four", "fives"], "", {"limit": 4}) == [1.5, 0.5]
    with pytest.raises(ConfigError, match="columns"):
        make_verifier(Extension(f"{HERE}.within", {"columns": {}}))


def test_a_sum_gives_each_of_its_terms_what_it_asks_for() -> None:
    verify = make_verifier(f"{HERE}.within + 0.5 * {HERE}.rarest")
    assert rewards_of(verify, ["5", "5", "66"], "5", {"limit": 1}) == [1.25, 1.25, 0.0]


def test_the_pool_hands_columns_on_and_judges_groups() -> None:
    with VerifierPool(f"{HERE}.within", 1, 10) as pool:
        assert (pool.judges_groups, pool.needs_columns) == (False, True)
        found = pool.verify([("abc", "", {"limit": 3}), ("abcd", "", {"limit": 3}), ("x", "")])
    assert [each.reward for each in found] == [1.0, 0.0, None]
    assert "KeyError" in found[2].detail

    with VerifierPool(f"{HERE}.rarest", 1, 10) as pool:
        assert (pool.judges_groups, pool.needs_columns) == (True, False)

        async def judged() -> list[float | None]:
            async with verdicts(pool) as judge:
                found = await judge.of_group(["5", "6", "5"], "5")
            return [each.reward for each in found]

        assert asyncio.run(judged()) == [0.5, 0.0, 0.5]
        assert [each.reward for each in pool.verify([("5", "5"), ("5", "6")])] == [1.0, 0.0]


def test_a_group_that_fails_is_a_failure_of_each_of_its_responses() -> None:
    with VerifierPool(f"{HERE}.one_too_few", 1, 10) as pool:

        async def judged(most: int) -> list[str]:
            async with verdicts(pool, most) as judge:
                found = await judge.of_group(["5", "6", "5"], "5")
            return [each.detail for each in found]

        told = asyncio.run(judged(3))
        assert len(told) == 3 and all("2 rewards for 3 responses" in each for each in told)
        with pytest.raises(TooManyFailuresError):
            asyncio.run(judged(2))

    with VerifierPool(f"{HERE}.not_numbers", 1, 10) as pool:

        async def rewards() -> list[float | None]:
            async with verdicts(pool) as judge:
                return [each.reward for each in await judge.of_group(["a", "b", "c"], "")]

        assert asyncio.run(rewards()) == [
            1.0,
            None,
            0.0,
        ]  # one that is no number costs itself alone


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, **sections})


def test_a_run_that_lacks_what_the_verifier_asks_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reads `columns` of the data"):
        open_pool(f"{HERE}.within", config(data={"path": "train.jsonl"}), 1)
    open_pool(f"{HERE}.within", config(data={"path": "a.jsonl", "columns": ["limit"]}), 1).close()
    open_pool(f"{HERE}.maybe", config(data={"path": "train.jsonl"}), 1).close()
    name = f"{HERE}.rarest"
    partial = {"reward": {"verifier": name}, "partial": {"tokens": 8}}
    with pytest.raises(ConfigError, match="partial rollouts finish them in different steps"):
        open_pool(name, config(**partial), 1)
    open_pool(name, config(reward={"verifier": name}), 1).close()


def rows(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_columns_are_read_by_name_or_all(tmp_path: Path) -> None:
    row = {"prompt": "p", "answer": 5, "meta": {"level": 3}, "tests": ["a", "b"]}
    path = rows(tmp_path / "train.jsonl", row)
    columns = [
        read_records(path, columns=each)[0][0].columns for each in ((), ["meta.level"], "all")
    ]
    assert columns == [None, {"meta.level": 3}, row]
    with pytest.raises(DataError, match=r"train.jsonl:1.*no 'hints'"):
        read_records(path, columns=["hints"])


def test_a_column_that_is_no_json_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["p"], "answer": ["5"], "image": [b"\x00"]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    path = str(tmp_path / "train.parquet")
    assert read_records(path, columns=["answer"])[0][0].columns == {"answer": "5"}
    with pytest.raises(DataError, match=r"'image' cannot be handed to a verifier"):
        read_records(path, columns="all")


class Groups:
    """Judges groups by the order in which it is given them."""

    judges_groups = True

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], str, Any]] = []

    async def of(self, *_: object) -> Any:
        raise AssertionError("a verifier of groups is asked for groups")

    async def of_group(self, responses: Any, answer: str, columns: Any = None) -> Any:
        self.asked.append((list(responses), answer, columns))
        await asyncio.sleep(0)
        return [f"{answer}{place}" for place in range(len(responses))]


def trajectory(cursor: int, sample: int) -> Trajectory:
    prompt = Prompt(cursor, str(cursor), "", f"answer {cursor} ", (1,), columns={"row": cursor})
    tokens, log_probs, mask = torch.zeros(1, dtype=torch.int32), torch.zeros(1), torch.ones(1) > 0
    text = f"sample {sample}"
    return Trajectory(prompt, sample, tokens, log_probs, mask, ((0, 1),), "stop", text)


def test_a_group_is_judged_when_its_last_response_has_come_in_the_order_of_samples() -> None:
    async def play() -> tuple[list[Any], list[Any]]:
        judge = Groups()
        judging = _Judging(judge, {1: 3, 2: 2})
        made = [trajectory(1, 2), trajectory(2, 0), trajectory(1, 0), trajectory(1, 1)]
        tasks = [asyncio.create_task(judging.of(each)) for each in made]
        found = await asyncio.gather(*(tasks[at] for at in (0, 2, 3)))
        assert not tasks[1].done()  # its group is not whole
        await judging.without(made[1].prompt)  # and never will be larger
        return [*found, await tasks[1]], judge.asked

    found, asked = asyncio.run(play())
    assert found == ["answer 1 2", "answer 1 0", "answer 1 1", "answer 2 0"]
    assert asked == [
        (["sample 0", "sample 1", "sample 2"], "answer 1 ", {"row": 1}),
        (["sample 0"], "answer 2 ", {"row": 2}),
    ]


def test_responses_of_a_group_that_is_given_up_wait_for_nobody() -> None:
    async def play() -> list[Any]:
        judging = _Judging(Groups(), {1: 2})
        waits = asyncio.create_task(judging.of(trajectory(1, 0)))
        await asyncio.sleep(0)
        judging.give_up(1)
        return [await waits, await judging.of(trajectory(1, 1))]

    assert asyncio.run(play()) == [None, None]


def test_an_error_of_the_verifier_is_that_of_all_who_wait() -> None:
    class Broken(Groups):
        async def of_group(self, *_: object) -> Any:
            raise TooManyFailuresError([], 0)

    async def play() -> list[Any]:
        judging = _Judging(Broken(), {1: 2})
        both = [judging.of(trajectory(1, 0)), judging.of(trajectory(1, 1))]
        return await asyncio.gather(*both, return_exceptions=True)

    assert [type(each) for each in asyncio.run(play())] == [TooManyFailuresError] * 2


REWARD = """
from collections import Counter


def verify(responses, answer, *, columns):
    said = Counter(responses)
    return [columns["pays"] / said[each] / len(responses) for each in responses]
"""


@pytest.mark.wide
def test_a_run_trains_and_evaluates_by_a_verifier_of_groups(tmp_path: Path) -> None:
    problems = [{"prompt": f"{n}+11+12", "answer": n + 23, "pays": float(n)} for n in range(10, 18)]
    rows(tmp_path / "train.jsonl", *problems[:6])
    rows(tmp_path / "held_out.jsonl", *problems[6:])
    (tmp_path / "novel.py").write_text(REWARD)
    settings = {
        "run": {"name": "novel", "dir": str(tmp_path), "steps": 2, "rollouts_every": 1},
        "model": {"path": str(ROOT / "assets/tiny-adder")},
        "runtime": {"runner": "inline"},
        "batch": {"prompts": 2, "samples_per_prompt": 4, "micro_batch_tokens": 1024},
        "rollout": {"max_prompt_tokens": 16, "max_new_tokens": 32},
        "data": {
            "source": "files",
            "path": str(tmp_path / "train.jsonl"),
            "eval_path": str(tmp_path / "held_out.jsonl"),
            "columns": ["pays"],
        },
        "reward": {"verifier": f"{tmp_path}/novel.py:verify"},
        "eval": {"prompts": 2, "samples": 3},
    }
    run_dir = train(Config.model_validate(settings))
    pays = {problem["prompt"]: problem["pays"] for problem in problems}
    responses = [
        json.loads(line)
        for file in (run_dir / "rollouts").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    groups: dict[Any, list[dict[str, Any]]] = {}
    for each in responses:
        groups.setdefault((each["step"], each["prompt"]), []).append(each)
    assert len(groups) == 4
    for (_, prompt), group in groups.items():
        said = Counter(each["response"] for each in group)
        assert len(group) == 4
        for each in group:
            assert each["reward"] == pytest.approx(pays[prompt] / said[each["response"]] / 4)
    evaluated = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert evaluated
