"""What an evaluation records."""

from __future__ import annotations

from megatron_stare.batch import Prompt, Sample
from megatron_stare.evaluate import evaluate


def test_prompts_of_the_same_problem_share_its_number() -> None:
    asked = [
        ("1+2=", "3", "1+2"),
        ("2+2=", "4", ""),
        ("2+1=", "3", "1+2"),
        ("2+2=", "5", ""),  # another answer is another problem
        ("2+2=", "4", ""),
    ]
    prompts = [Prompt(i, "same id", text, answer, problem=problem) for i, (text, answer, problem) in enumerate(asked)]

    def rollout(prompts: list[Prompt], count: int, *, step: int, seed: int, greedy: bool) -> list[Sample]:
        return [Sample(prompt, 0, [1], [0.0], [0], "stop", reward=1.0) for prompt in prompts]

    record = evaluate(prompts, rollout, lambda samples: None, step=0, greedy=False)
    assert record["problem"] == [0, 1, 0, 2, 1]
    assert record["problems"] == 5
