"""The task of long chains: find the three signs that lead from a number to a total. Generated,
never stored.

'33 8 5 2 = 38 :' asks for the signs of 33 + 8 - 5 + 2 = 38. A response is either a short guess, '+8
+5 +2', or a search. A search makes one attempt after another, with the running total after every
step, and says 'wait' after a miss: '+8 41 +5 46 -2 44 wait +8 41 -5 36 +2 38'. Only the part of a
response after the last word 'wait' is graded. A guess is right only by luck. A search finds the
right signs unless the search gives up. Longer responses are therefore right more often.

Problem i of a stream is a pure function of (seed, split, i). A fixed hash assigns each problem to a
split, so training and held-out problems never overlap. `SignsPrompts` serves the rollout;
demonstrations serve the supervised warm-up of `tools/make_tiny_model.py`; `VOCABULARY` serves its
tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, permutations, product

from megatron_stare.data.generated import GeneratedPrompts
from megatron_stare.data.streams import Split, counter_hash

REFLECTION = "wait"
"""Word between a failed attempt and the next one."""

VOCABULARY = (
    *map(str, range(1, 69)),
    *(f"{sign}{operand}" for sign in "+-" for operand in range(1, 10)),
    "=",
    ":",
    REFLECTION,
)
"""Every word of prompts and demonstrations; spaces separate words."""

SIGNS: tuple[tuple[int, int, int], ...] = tuple(
    (a, b, c) for a, b, c in product((1, -1), (1, -1), (1, -1))
)
"""The eight ways to sign three operands."""

PROBLEMS: dict[Split, int] = {"train": 11_725, "eval": 1_395}
"""Number of problems in each split; reorderings are one problem."""

_EVAL_ONE_IN = 10
_STARTS = range(25, 45)  # gives totals from 1 to 68
_OPERANDS = tuple(permutations(range(1, 10), 3))


@dataclass(frozen=True)
class Problem:
    """The problem start ± a ± b ± c = total, with different digits a, b, c and at least one
    solution."""

    start: int
    operands: tuple[int, int, int]
    total: int

    @property
    def text(self) -> str:
        """The prompt: '33 8 5 2 = 38 :'."""
        return f"{self.answer} :"

    @property
    def answer(self) -> str:
        """Returns the text of the problem, such as '33 8 5 2 = 38', as the answer. The answer names
        no signs, because every choice of signs that makes the equation true is right."""
        return f"{self.start} {' '.join(map(str, self.operands))} = {self.total}"

    @property
    def name(self) -> str:
        """Name that all reorderings of the problem share: '33 2 5 8 = 38'."""
        return Problem(self.start, tuple(sorted(self.operands)), self.total).answer  # type: ignore[arg-type]

    def totals(self, signs: tuple[int, int, int]) -> list[int]:
        """Returns the running totals of an attempt, without the start; the last is its result."""
        steps = (sign * operand for sign, operand in zip(signs, self.operands, strict=True))
        return list(accumulate(steps, initial=self.start))[1:]


def draw_problem(seed: int, split: Split, index: int) -> Problem:
    """Returns problem number `index` of a stream. Problems may repeat within a stream, identically
    or reordered, but never across splits."""
    attempt = 0
    while True:
        draw = counter_hash(seed, split == "eval", index, attempt)
        draw, sign = divmod(draw, len(SIGNS))
        draw, which = divmod(draw, len(_OPERANDS))
        problem = Problem(_STARTS[draw % len(_STARTS)], _OPERANDS[which], 0)
        problem = Problem(problem.start, problem.operands, problem.totals(SIGNS[sign])[-1])
        if split_of(problem) == split:
            return problem
        attempt += 1


def split_of(problem: Problem) -> Split:
    """Returns the split of a problem, which does not depend on the seed. Reorderings of a problem
    share a split."""
    key = counter_hash(problem.start, *sorted(problem.operands), problem.total)
    return "eval" if key % _EVAL_ONE_IN == 0 else "train"


def demonstration(problem: Problem, seed: int, short_rate: float, give_up_rate: float) -> str:
    """Returns a response for supervised training. The response is a guess or a search, as the
    module describes. A search tries the eight sign combinations in the cyclic order of SIGNS, from
    a random first one.

    Args:
        seed: picks the response, together with the problem.
        short_rate: probability of a guess, with all signs alike, towards the total.
        give_up_rate: probability, after each failed attempt, that a search ends there; otherwise it
            goes on to the first right attempt.
    """
    for name, rate in (("short_rate", short_rate), ("give_up_rate", give_up_rate)):
        if not 0 <= rate <= 1:
            raise ValueError(f"{name} is a probability, got {rate}")
    key = (seed, problem.start, *problem.operands, problem.total)
    first = counter_hash(*key, 0) % len(SIGNS)
    order = [*SIGNS[first:], *SIGNS[:first]]
    if _chance(*key, 1) < short_rate:
        return " ".join(_steps(problem, SIGNS[0] if problem.total > problem.start else SIGNS[-1]))
    attempts = []
    for number, signs in enumerate(order):
        totals = problem.totals(signs)
        attempts.append(
            " ".join(
                f"{step} {total}"
                for step, total in zip(_steps(problem, signs), totals, strict=True)
            )
        )
        if totals[-1] == problem.total or _chance(*key, 2 + number) < give_up_rate:
            break
    return f" {REFLECTION} ".join(attempts)


def _steps(problem: Problem, signs: tuple[int, int, int]) -> list[str]:
    return [f"{sign * operand:+d}" for sign, operand in zip(signs, problem.operands, strict=True)]


def _chance(*counters: int) -> float:
    return counter_hash(*counters) / 2**64


class SignsPrompts(GeneratedPrompts):
    """A PromptSource of sign problems."""

    counts = PROBLEMS

    def problem(self, index: int) -> Problem:
        return draw_problem(self._seed, self._split, index)
