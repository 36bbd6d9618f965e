"""Pass@1 on held-out problems, from the engines that training samples from.

Problems and sampling noise are the same at every evaluation and for every seed of the run, so results are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from megatron_stare.batch import Prompt
from megatron_stare.records.trajectory import Trajectory

EVAL_SEED = 20240917  # keys the noise of every evaluation of every run
SHOWN = 8  # samples kept in the record


class Rollout(Protocol):
    """Samples `count` responses a prompt; see session.Session.rollout."""

    def __call__(
        self, prompts: list[Prompt], count: int, *, step: int, seed: int, greedy: bool
    ) -> list[Trajectory]: ...


def evaluate(
    prompts: list[Prompt], rollout: Rollout, score: Callable[[list[Trajectory]], Any], *, step: int, greedy: bool
) -> dict[str, Any]:
    """One evaluation, as eval.jsonl keeps it. A problem whose verifier failed counts as wrong and among `failures`.

    Args:
        step: training steps behind the weights.
        greedy: also decode greedily.
    """
    sampled = rollout(prompts, 1, step=0, seed=EVAL_SEED, greedy=False)
    score(sampled)
    record: dict[str, Any] = {
        "step": step,
        "weights": "base" if step == 0 else "trained",
        "problems": len(prompts),
        "correct": _correct(sampled),
        "failures": sum(s.reward_status != "ok" for s in sampled),
        "greedy": None,
        "samples": [
            {"prompt": s.prompt.text, "response": s.text, "answer": s.prompt.answer, "reward": s.reward}
            for s in sampled[:SHOWN]
        ],
    }
    record["pass1"] = sum(record["correct"]) / max(len(prompts), 1)
    if greedy:
        decoded = rollout(prompts, 1, step=0, seed=EVAL_SEED, greedy=True)
        score(decoded)
        record["greedy_correct"] = _correct(decoded)
        record["greedy"] = sum(record["greedy_correct"]) / max(len(prompts), 1)
    return record


def _correct(samples: list[Trajectory]) -> list[int]:
    return [int((s.reward or 0.0) > 0.5) for s in samples]
