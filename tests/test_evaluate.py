"""Pass@1 and its record, where verifiers fail."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.runs import ROOT

from megatron_stare.config.load import load_config
from megatron_stare.driver.evaluator import Evaluator, answered
from megatron_stare.errors import WeightVersionError
from megatron_stare.evaluation.estimates import wilson_interval
from megatron_stare.evaluation.evaluate import evaluate
from megatron_stare.evaluation.response import Response
from megatron_stare.observability.metrics.paired import compared
from megatron_stare.records.batch import Prompt
from megatron_stare.records.trajectory import sampled_trajectory
from megatron_stare.rollout.sources.rollout_source import Rollouts
from megatron_stare.tasks.task import Evaluation, Task

PROBLEMS = [Prompt(i, str(i), f"{i}+{i}=", str(2 * i)) for i in range(10)]
# by problem: what the verifier says of the sampled answer and of the greedy one; None: it failed,
# in either way
SAMPLED: list[float | None] = [1.0, 0.0, None, 1.0, None, 0.0, 0.4, 1.0, None, 0.0]
GREEDY: list[float | None] = [1.0, None, 1.0, 1.0, None, 0.0, 1.0, 1.0, 0.0, 0.0]


def unasked(pairs: Any) -> list[bool]:
    """For verifiers that do not say what is answered."""
    raise AssertionError(f"asked of {pairs}")


def run(greedy: bool, step: int = 3) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The record, and how each rollout was asked for."""
    asked: list[dict[str, Any]] = []

    def rollout(prompts: list[Prompt], count: int, **how: Any) -> list[Response]:
        asked.append({"count": count, **how})
        made = [sampled_trajectory(p, 0, [2], [-1.0]) for p in prompts]
        for each in made:
            reward = (GREEDY if how["greedy"] else SAMPLED)[each.prompt.cursor]
            failure = "timeout" if each.prompt.cursor % 4 == 0 else "crash"
            each.reward, each.reward_status = reward, "ok" if reward is not None else failure  # type: ignore[assignment]
        return [Response.of(each) for each in made]

    return evaluate(PROBLEMS, rollout, unasked, step=step, seed=7, greedy=greedy).record, asked


def test_a_problem_whose_verifier_failed_counts_as_wrong() -> None:
    record, _ = run(greedy=True)
    assert record["problems"] == len(record["correct"]) == 10
    assert record["correct"] == [1, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    # of all problems, not of the seven that were verified
    assert record["pass1"] == pytest.approx(0.3)
    assert record["failures"] == 3
    assert record["greedy_correct"] == [1, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert record["greedy"] == pytest.approx(0.5)


def test_every_evaluation_samples_alike() -> None:
    (_, first), (_, later) = run(greedy=True, step=0), run(greedy=True, step=40)
    assert first == later
    assert [how["greedy"] for how in first] == [False, True]
    assert {(how["seed"], how["step"], how["count"]) for how in first} == {(7, 0, 1)}


def test_the_record_without_greedy_decoding() -> None:
    record, asked = run(greedy=False, step=0)
    assert (record["weights"], record["greedy"], len(asked)) == ("base", None, 1)
    assert "greedy_correct" not in record
    assert run(greedy=False)[0]["weights"] == "trained"
    assert [s["reward"] for s in record["samples"]] == SAMPLED[:8]


def test_the_result_of_a_problem_is_the_share_of_its_responses() -> None:
    rewards = [[1.0, 0.0, None], [1.0, 1.0, 1.0], [0.0, 0.0, 0.4], [None, 1.0, 0.6]]

    def rollout(prompts: list[Prompt], count: int, **how: Any) -> list[Response]:
        made = [
            sampled_trajectory(p, index, [2], [-1.0]) for p in prompts for index in range(count)
        ]
        for each in made:
            each.reward = rewards[each.prompt.cursor][each.sample_index] if count == 3 else 1.0
            each.reward_status = "ok" if each.reward is not None else "crash"
            each.text = f"{each.prompt.cursor}:{each.sample_index}"
        return [Response.of(each) for each in made]

    about = {"task": "sums", "decoding": {"samples": 3}}
    found = evaluate(
        PROBLEMS[:4],
        rollout,
        unasked,
        step=2,
        seed=1,
        greedy=True,
        samples=3,
        ks=[1, 3],
        about=about,
    )
    record = found.record
    assert record["correct"] == pytest.approx([1 / 3, 1, 0, 2 / 3])
    assert record["pass1"] == pytest.approx(0.5)
    assert (record["problems"], record["failures"], len(record["problem"])) == (4, 2, 4)
    assert record["greedy_correct"] == [1, 1, 1, 1]  # one response a problem
    assert [s["response"] for s in record["samples"]] == ["0:0", "1:0", "2:0", "3:0"]
    assert (record["task"], record["decoding"]) == ("sums", {"samples": 3})
    assert record["results"]["avg@3"]["value"] == pytest.approx(0.5)
    assert record["results"]["pass@3"]["value"] == pytest.approx(0.75)
    assert record["results"].keys() == {"avg@3", "pass@1", "pass@3"}
    assert [(row["id"], row["right"], row["greedy"]) for row in found.problems] == [
        ("0", 1, True),
        ("1", 3, True),
        ("2", 0, True),
        ("3", 2, True),
    ]


def test_answers_are_counted_where_the_verifier_says_them() -> None:
    """By its judgement: 0.5 and 1/2 are one answer, which has the majority."""
    given = [["3", "0.5", "1/2"], ["2", "2", "4"]]

    def rollout(prompts: list[Prompt], count: int, **how: Any) -> list[Response]:
        made = [
            sampled_trajectory(p, index, [2], [-1.0]) for p in prompts for index in range(count)
        ]
        for each in made:
            each.reward_status, each.answer = "ok", given[each.prompt.cursor][each.sample_index]
            each.reward, each.text = float(each.answer in ("0.5", "1/2", "4")), f"= {each.answer}"
        return [Response.of(each) for each in made]

    def judged(pairs: Any) -> list[bool]:
        return [pair == ("= 1/2", "0.5") for pair in pairs]

    found = evaluate(PROBLEMS[:2], rollout, judged, step=0, seed=1, greedy=False, samples=3)
    assert found.record["results"]["maj@3"]["value"] == 0.5
    assert [row["majority"] for row in found.problems] == ["0.5", "2"]
    assert found.record["distinct_answers"] == 2


def test_prompts_of_the_same_problem_share_its_number() -> None:
    asked = [
        ("1+2=", "3", "1+2"),
        ("2+2=", "4", ""),
        ("2+1=", "3", "1+2"),
        ("2+2=", "5", ""),  # another answer is another problem
        ("2+2=", "4", ""),
    ]
    prompts = [
        Prompt(i, "same id", text, answer, problem=problem)
        for i, (text, answer, problem) in enumerate(asked)
    ]

    def rollout(
        prompts: list[Prompt], count: int, *, step: int, seed: int, greedy: bool
    ) -> list[Response]:
        made = [sampled_trajectory(prompt, 0, [1], [0.0]) for prompt in prompts]
        for each in made:
            each.reward = 1.0
        return [Response.of(each) for each in made]

    record = evaluate(prompts, rollout, unasked, step=0, seed=1, greedy=False).record
    assert record["problem"] == [0, 1, 0, 2, 1]
    assert record["problems"] == 5
    whole, by_itself = record["results"]["pass@1"], wilson_interval([1.0] * 5)
    assert whole["low"] < by_itself[1]  # three problems, not five


def test_a_record_tells_evaluations_apart_that_number_their_problems_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def responses(self: Evaluator, *given: Any, **how: Any) -> list[Response]:
        made = [sampled_trajectory(prompt, 0, [1], [0.0]) for prompt in given[-2]]
        for each in made:
            each.reward, each.reward_status = 1.0, "ok"
        return [Response.of(each) for each in made]

    monkeypatch.setattr(Evaluator, "responses", responses)

    def record(*settings: str, prompts: list[Prompt] = PROBLEMS) -> dict[str, Any]:
        config = load_config(ROOT / "configs/quickstart.yaml", ["eval.prompts=10", *settings])
        evaluation = Evaluation(Task(config), prompts, None)  # type: ignore[arg-type]
        return Evaluator(None, {}, config.reward, (1,)).evaluate(evaluation, 0, 0).record

    first = record()
    texts = [replace(prompt, text=f"0+{prompt.text}") for prompt in PROBLEMS]
    answers = [replace(prompt, answer="0") for prompt in PROBLEMS]
    # another tokenizer
    tokens = [replace(prompt, token_ids=(prompt.cursor,)) for prompt in PROBLEMS]
    found = {
        "other texts": record(prompts=texts),
        "other answers": record(prompts=answers),
        "other tokens": record(prompts=tokens),
        "template": record("data.template='Q: {prompt}'"),
        "chat": record("data.chat_template=true"),
        "chat values": record("data.chat_template_kwargs={thinking: false}"),
        "verifier": record("reward.verifier=math"),
        "environment": record("rollout.environment={name: tools, memory_mb: 9}"),
        "temperature": record("rollout.temperature=0.6"),
        "seed": record("eval.seed=5", "run.seed=6"),
    }
    assert all(each["problem"] == first["problem"] for each in found.values())
    same = (0.0, 0.0, 0.0)
    assert {name: compared(first, each, "correct") for name, each in found.items()} == {
        "other texts": "different problems",
        "other answers": "different problems",
        "other tokens": same,
        "template": "different template",
        "chat": "different template",
        "chat values": "different template",
        "verifier": "different verifier",
        "environment": "different environment",
        "temperature": "decoded differently",
        "seed": same,
    }
    place = "rollout.environment={name: tools, memory_mb: 9, sandbox_workers: 3}"
    assert compared(found["environment"], record(place), "correct") == same


def test_the_bar_of_an_evaluation_counts_all_of_its_answers() -> None:
    """Sampled and greedy ones: it never goes back, and it ends at its end."""
    task = SimpleNamespace(samples=2, config=SimpleNamespace(eval=SimpleNamespace(greedy=True)))
    told: list[tuple[int, int]] = []
    progress = answered(
        SimpleNamespace(prompts=PROBLEMS, task=task), lambda *seen: told.append(seen)
    )  # type: ignore[arg-type]
    for wanted in (20, 10):
        for done in range(wanted + 1):
            progress(done, wanted)
    assert [done for done, _ in told] == [*range(21), *range(20, 31)]
    assert {total for _, total in told} == {30}


def test_a_token_that_other_weights_sampled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not kept: it would be counted when the command goes on."""
    config = load_config(ROOT / "configs/quickstart.yaml", ["eval.prompts=2", "eval.greedy=false"])
    evaluation = Evaluation(Task(config), PROBLEMS[:2], None)  # type: ignore[arg-type]
    kept: list[Response] = []
    keeper = SimpleNamespace(
        known=lambda greedy: {}, add=lambda response, greedy: kept.append(response)
    )

    def make(
        self: Rollouts, prompts: Any, count: int, params: Any, *, wanted: Any, verified: Any
    ) -> None:
        for (prompt, index), version in zip(wanted, (4, 3), strict=True):
            verified(sampled_trajectory(prompt, index, [2], [-1.0], version=version))

    monkeypatch.setattr(Rollouts, "make", make)
    evaluator = Evaluator(SimpleNamespace(), {}, config.reward, (1,))  # type: ignore[arg-type]
    with pytest.raises(
        WeightVersionError, match="holds version 4, but the rollout was sampled by version 3"
    ):
        evaluator.evaluate(evaluation, 4, 4, kept=keeper)
    assert [response.prompt for response in kept] == [0]
