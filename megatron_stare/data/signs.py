"""Defines a task with long chains of thought. The policy finds the three signs that lead from a
number to a total. Problems are generated when needed and never stored.

For example, the prompt '33 8 5 2 = 38 :' asks for the signs in 33 + 8 - 5 + 2 = 38. A demonstration
is either a short guess, such as '+8 +5 +2', or a long response that tries one combination of signs
after another. In a long response, a running total follows every signed number, and the word 'wait'
stands between two attempts. For example, the long response '+8 41 +5 46 -2 44 wait +8 41 -5 36 +2
38' consists of a wrong attempt and a right attempt. Only the part of a response after the last word
'wait' is graded. A guess is right only by luck. A long response finds the right signs unless the
response ends too early. Longer responses are therefore right more often.

Problem number i of a stream depends only on i, the seed and the split. A fixed hash assigns each
problem to the training split or the evaluation split, so the two splits share no problem. Rollouts
use `SignsPrompts`. `tools/make_tiny_model.py` trains a small model on demonstrations of the signs
task. The model's tokenizer uses `VOCABULARY`.
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
"""Every word that occurs in prompts and demonstrations. Spaces separate words."""

SIGNS: tuple[tuple[int, int, int], ...] = tuple(
    (a, b, c) for a, b, c in product((1, -1), (1, -1), (1, -1))
)
"""The eight combinations of signs for three operands."""

PROBLEMS: dict[Split, int] = {"train": 11_725, "eval": 1_395}
"""Number of problems in each split. Reorderings of the same operands count as one problem."""

_EVAL_ONE_IN = 10
_STARTS = range(25, 45)  # gives totals from 1 to 68
_OPERANDS = tuple(permutations(range(1, 10), 3))


@dataclass(frozen=True)
class Problem:
    """Problem that asks for the three signs in the equation start ± a ± b ± c = total. The digits
    a, b, c differ from each other, and at least one choice of signs is right."""

    start: int
    operands: tuple[int, int, int]
    total: int

    @property
    def text(self) -> str:
        """The prompt: '33 8 5 2 = 38 :'."""
        return f"{self.answer} :"

    @property
    def answer(self) -> str:
        """Returns the text that the verifier gets as the reference answer, such as '33 8 5 2 = 38'.
        A response is right if its signs make the equation true. The reference answer contains no
        signs, because one problem can have several right combinations of signs."""
        return f"{self.start} {' '.join(map(str, self.operands))} = {self.total}"

    @property
    def name(self) -> str:
        """Name of the problem, such as '33 2 5 8 = 38'. Problems that differ only in the order of
        their operands have the same name."""
        return Problem(self.start, tuple(sorted(self.operands)), self.total).answer  # type: ignore[arg-type]

    def totals(self, signs: tuple[int, int, int]) -> list[int]:
        """Returns the three running totals of an attempt. The first running total includes the
        first operand; the last running total is the attempt's result."""
        steps = (sign * operand for sign, operand in zip(signs, self.operands, strict=True))
        return list(accumulate(steps, initial=self.start))[1:]


def draw_problem(seed: int, split: Split, index: int) -> Problem:
    """Returns the problem at position `index` of a stream. A stream may contain the same problem
    several times, with its operands in the same or in another order. The two splits never share a
    problem."""
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
    """Returns the split of a problem. The split does not depend on the seed. All problems that
    differ only in the order of their operands are in the same split."""
    key = counter_hash(problem.start, *sorted(problem.operands), problem.total)
    return "eval" if key % _EVAL_ONE_IN == 0 else "train"


def demonstration(problem: Problem, seed: int, short_rate: float, give_up_rate: float) -> str:
    """Returns a response for supervised training: a short guess or a long response, as the module's
    docstring explains. The first attempt of a long response uses a random combination of SIGNS, and
    each later attempt uses the next combination in cyclic order.

    Args:
        seed: selects the response. The response also depends on the problem.
        short_rate: probability of a guess. A guess uses one sign for all operands: + if the total
            is above the start, and - otherwise.
        give_up_rate: probability that a long response ends after a wrong attempt. Otherwise, the
            long response continues until an attempt is right.
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
