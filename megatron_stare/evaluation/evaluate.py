"""Evaluates the policy on a task's held-out problems, both during training and for `megatron-stare
eval`.

Every evaluation uses the same problems and the same sampling noise, whatever the seed of the run.
The results of two evaluations can therefore be compared problem by problem. The record of an
evaluation names the problem of each prompt, because results of prompts with the same problem are
not independent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from megatron_stare.evaluation.response import Judged, Response, answer_classes
from megatron_stare.evaluation.results import Answered, default_ks, problem_row, results_of
from megatron_stare.records.batch import Prompt

SHOWN = 8  # problems for which the record keeps a response


class Rollout(Protocol):
    """Returns `count` verified responses to every prompt, ordered by prompt and then by sample
    index. See evaluator.Evaluator.responses."""

    def __call__(
        self, prompts: list[Prompt], count: int, *, step: int, seed: int, greedy: bool
    ) -> Sequence[Response]: ...


@dataclass(frozen=True)
class Evaluated:
    """Result of an evaluation of one task. Contains the record for eval.jsonl and one row for every
    prompt."""

    record: dict[str, Any]
    problems: list[dict[str, Any]]


def evaluate(
    prompts: list[Prompt],
    rollout: Rollout,
    judged: Judged,
    *,
    step: int,
    seed: int,
    greedy: bool,
    samples: int = 1,
    ks: Sequence[int] = (),
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Evaluated:
    """Runs one evaluation. If the verifier fails on a response, the response counts as wrong, and
    the record's entry `failures` counts this response.

    For each prompt, the record's entry `correct` contains the share of right responses to this
    prompt (avg@k). The record's entry `pass1` is the mean of `correct` and estimates pass@1,
    whatever the number of samples. The module evaluation/results.py computes pass@k, maj@k and all
    further figures of the record.

    Args:
        judged: the task's verifier, used to find answers that are the same.
        step: number of training steps that produced the weights.
        seed: seed of the sampling noise.
        greedy: if true, also decode one greedy response per prompt.
        samples: number of sampled responses per prompt.
        ks: values of k for pass@k and maj@k; (): the powers of two up to `samples`, and `samples`.
        about: further entries of the record that describe the task.
    """
    groups = _by_prompt(rollout(prompts, samples, step=0, seed=seed, greedy=False), samples)
    says = any(response.answer is not None for group in groups for response in group)
    classes = answer_classes(groups, judged) if says else [None] * len(groups)
    answered = [Answered(group, each) for group, each in zip(groups, classes, strict=True)]
    numbers, ks = _numbers(prompts), ks or default_ks(samples)
    record: dict[str, Any] = {
        "step": step,
        "weights": "base" if step == 0 else "trained",
        **about,
        "problems": len(prompts),
        "problem": numbers,
        "correct": [each.right if samples == 1 else each.share for each in answered],
        "failures": sum(response.status != "ok" for group in groups for response in group),
        "greedy": None,
        **results_of(answered, numbers, ks),
        "samples": [
            {
                "prompt": prompt.text,
                "response": group[0].text,
                "answer": prompt.answer,
                "reward": group[0].reward,
            }
            for prompt, group in zip(prompts[:SHOWN], groups, strict=False)
        ],
    }
    record["pass1"] = sum(record["correct"]) / max(len(prompts), 1)
    rows = [
        {"id": prompt.id, "problem": number, "answer": prompt.answer, **problem_row(each, ks)}
        for prompt, number, each in zip(prompts, numbers, answered, strict=True)
    ]
    if greedy:
        decoded = rollout(prompts, 1, step=0, seed=seed, greedy=True)
        record["greedy_correct"] = [int(response.right) for response in decoded]
        record["greedy"] = sum(record["greedy_correct"]) / max(len(prompts), 1)
        for row, response in zip(rows, decoded, strict=True):
            row["greedy"] = response.right
    return Evaluated(record, rows)


def _by_prompt(responses: Sequence[Response], samples: int) -> list[Sequence[Response]]:
    return [responses[at : at + samples] for at in range(0, len(responses), samples)]


def _numbers(prompts: list[Prompt]) -> list[int]:
    """Returns, for each prompt, the number that identifies the prompt's problem. Problems are
    numbered from 0 in the order in which they first appear."""
    names = [prompt.problem or (prompt.text, prompt.answer) for prompt in prompts]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [number[name] for name in names]
