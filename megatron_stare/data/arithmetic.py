"""The task of the quickstart. The policy adds three two-digit numbers in two written steps.
Problems are generated when needed and never stored.

Problem number i of a stream depends only on i, the seed and the split. A fixed hash assigns each
problem to the training split or the evaluation split, so the two splits share no problem. Rollouts
use `ArithmeticPrompts`. The quickstart's initial model was trained on demonstrations of this task.
The tokenizer of the quickstart's model uses `ALPHABET`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.data.generated import GeneratedPrompts
from megatron_stare.data.streams import Split, counter_hash

ALPHABET = "0123456789+=;"
"""Every character that occurs in prompts and demonstrations."""

PROBLEMS: dict[Split, int] = {"train": 112_915, "eval": 12_665}
"""Number of problems in each split. Reorderings of the same numbers count as one problem."""

_EVAL_ONE_IN = 10
_SLIPS = (-10, -2, -1, 1, 2, 10)  # a forgotten or doubled carry, or a miscount


@dataclass(frozen=True)
class Problem:
    """The addition problem a + b + c, where a, b and c are numbers from 10 to 99."""

    operands: tuple[int, int, int]

    @property
    def text(self) -> str:
        """The prompt: '27+58+14='."""
        return "+".join(map(str, self.operands)) + "="

    @property
    def answer(self) -> str:
        """The sum: '99'."""
        return str(sum(self.operands))

    @property
    def name(self) -> str:
        """Name of the problem, such as '14+27+58'. All reorderings of a problem have the same
        name."""
        return "+".join(map(str, sorted(self.operands)))


def draw_problem(seed: int, split: Split, index: int) -> Problem:
    """Returns the problem at position `index` of a stream.

    A stream may contain the same problem several times. When a problem is repeated, its three
    numbers may be in another order. The two splits never share a problem. Of the first 1,000
    held-out problems, 36 consist of the same three numbers as an earlier problem. Of these 36
    problems, 4 have their numbers in the same order as the earlier problem, and 32 have their
    numbers in another order.
    """
    attempt = 0
    while True:
        draw = counter_hash(seed, split == "eval", index, attempt) % 90**3
        problem = Problem((10 + draw // 90**2, 10 + draw // 90 % 90, 10 + draw % 90))
        if split_of(problem) == split:
            return problem
        attempt += 1


def split_of(problem: Problem) -> Split:
    """Returns the split of a problem. The split does not depend on the seed. All reorderings of a
    problem are in the same split, because the hash that chooses the split ignores the order of the
    numbers."""
    return "eval" if counter_hash(*sorted(problem.operands)) % _EVAL_ONE_IN == 0 else "train"


def demonstration(problem: Problem, seed: int, wrong_rate: float) -> str:
    """Returns a worked answer, such as '14+27=41;58+41=99'. There are twelve ways to order the two
    additions and their terms, and all of them are equally likely.

    Args:
        seed: selects the derivation. The derivation also depends on the problem.
        wrong_rate: probability that one of the two sums is wrong. The rest of the answer uses the
            wrong sum, so the final answer is wrong.
    """
    if not 0 <= wrong_rate <= 1:
        raise ValueError(f"wrong_rate is a probability, got {wrong_rate}")
    rest, last = divmod(counter_hash(seed, *problem.operands, 0), 3)
    rest, swap_first = divmod(rest, 2)
    rest, swap_second = divmod(rest, 2)
    rest, slip_at = divmod(rest, 2)
    slip = _SLIPS[rest % len(_SLIPS)]
    wrong = counter_hash(seed, *problem.operands, 1) < wrong_rate * 2**64
    slips = [slip * (wrong and slip_at == line) for line in range(2)]

    pair = [x for position, x in enumerate(problem.operands) if position != last]
    partial, first = _line(pair, bool(swap_first), slips[0])
    _, second = _line([partial, problem.operands[last]], bool(swap_second), slips[1])
    return f"{first};{second}"


def _line(pair: list[int], swap: bool, slip: int) -> tuple[int, str]:
    left, right = reversed(pair) if swap else pair
    total = left + right + slip
    return total, f"{left}+{right}={total}"


class ArithmeticPrompts(GeneratedPrompts):
    """A PromptSource of arithmetic problems."""

    counts = PROBLEMS

    def problem(self, index: int) -> Problem:
        return draw_problem(self._seed, self._split, index)
