"""The two tasks of vs_trl.py, the same for both trainers: the quickstart's, and one of ragged
responses.

Light: TRL's environment imports it, and so do reward workers.
"""

from __future__ import annotations

import random
from pathlib import Path

from megatron_stare.data.arithmetic import draw_problem
from megatron_stare.data.streams import stream_seed
from megatron_stare.rewards.arithmetic_verifier import verify

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "assets/tiny-adder"
LONGEST = 512
SILENT = 1  # the model's end token, which the ragged task's model never draws


def problems(seed: int, count: int) -> list[dict[str, str]]:
    """The first `count` training problems of a run of this seed: prompt and answer."""
    drawn = (draw_problem(stream_seed(seed, "train"), "train", i) for i in range(count))
    return [{"prompt": problem.text, "answer": problem.answer} for problem in drawn]


def right(response: str, answer: str) -> float:
    """The quickstart's reward."""
    return verify(response, answer)


def mostly_even(response: str, answer: str) -> float:
    """The ragged task's: half of the responses or so get 1, as lengths are given and nothing is to
    be learnt."""
    digits = [c for c in response if c.isdigit()]
    return float(2 * sum(c in "02468" for c in digits) > len(digits))


class Lengths:
    """Response lengths, log-normal: the median 96 tokens, one in six above 240, none above 512."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self) -> int:
        return min(LONGEST, max(4, round(96 * self._random.lognormvariate(0.0, 0.9))))
