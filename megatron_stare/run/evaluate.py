"""Results on a task's held-out problems, from the engines that training samples from.

Problems and sampling noise are the same at every evaluation and for every seed of the run, so results are paired.
Prompts of the same problem are kept together by its number: their results are not independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from megatron_stare.batch import Prompt
from megatron_stare.records.trajectory import Trajectory

EVAL_SEED = 20240917  # keys the noise of every evaluation of every run
SHOWN = 8  # problems of which the record keeps a response


class Rollout(Protocol):
    """`count` verified responses a prompt; see session.Session.trajectories."""

    def __call__(
        self, prompts: list[Prompt], count: int, *, step: int, seed: int, greedy: bool
    ) -> list[Trajectory]: ...


def evaluate(
    prompts: list[Prompt],
    rollout: Rollout,
    *,
    step: int,
    greedy: bool,
    samples: int = 1,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """One evaluation, as eval.jsonl keeps it. A response whose verifier failed counts as wrong and among `failures`.

    `correct` has a number a problem: the share of its responses that are right (avg@k). `pass1` is their mean, an
    estimate of pass@1 whatever `samples` is.

    Args:
        step: training steps behind the weights.
        greedy: also decode greedily, one response a problem.
        samples: responses a problem.
        about: more that the record says, of the task.
    """
    sampled = rollout(prompts, samples, step=0, seed=EVAL_SEED, greedy=False)
    record: dict[str, Any] = {
        "step": step,
        "weights": "base" if step == 0 else "trained",
        **about,
        "problems": len(prompts),
        "problem": _numbers(prompts),
        "correct": _correct(sampled, samples),
        "failures": sum(s.reward_status != "ok" for s in sampled),
        "greedy": None,
        "samples": [
            {"prompt": s.prompt.text, "response": s.text, "answer": s.prompt.answer, "reward": s.reward}
            for s in sampled[::samples][:SHOWN]
        ],
    }
    record["pass1"] = sum(record["correct"]) / max(len(prompts), 1)
    if greedy:
        decoded = rollout(prompts, 1, step=0, seed=EVAL_SEED, greedy=True)
        record["greedy_correct"] = _correct(decoded, 1)
        record["greedy"] = sum(record["greedy_correct"]) / max(len(prompts), 1)
    return record


def _numbers(prompts: list[Prompt]) -> list[int]:
    """Each prompt's problem, numbered from 0 as they come."""
    names = [prompt.problem or (prompt.text, prompt.answer) for prompt in prompts]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return [number[name] for name in names]


def _correct(trajectories: list[Trajectory], samples: int) -> list[int] | list[float]:
    """By problem, the share of its responses that are right."""
    right = [int((t.reward or 0.0) > 0.5) for t in trajectories]
    if samples == 1:
        return right
    return [sum(right[i : i + samples]) / samples for i in range(0, len(right), samples)]
