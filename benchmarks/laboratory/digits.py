"""Two tasks of three digits in which a policy that has collapsed must lose: a source of prompts and
a verifier.

A prompt is two digits, '47:'. The response is three digits.

`changing`: until a step the right response to 'ab' is 'aba', and afterwards it is
'(9-a)(9-b)(9-a)'. All right pays 1, and less pays half the share of places that are right. A policy
without entropy no longer samples what the new rule asks for.

`rare`: after a first digit 1, an a pays .25 at either place. After a 7, a 9-b and then a 9-a pay .5
each. Other first digits pay nothing. The starting model seldom says 7 and seldom goes on right
after it, so 7 pays less than 1 until the policy has learnt what follows it, which it can only while
it samples 7.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_stare.data.generated import GeneratedPrompts
from megatron_stare.data.streams import Split, counter_hash

COMMON, RARE = 1, 7  # first digits that pay; the rare one pays more
KNOWN_ANSWERS = [
    ("474", "before 47", 1.0),
    ("479", "before 47", 1 / 3),
    ("525", "after 47", 1.0),
    ("474", "after 47", 0.0),
    ("144", "rare 47", 0.5),
    ("149", "rare 47", 0.25),
    ("191", "rare 47", 0.0),
    ("244", "rare 47", 0.0),
    ("725", "rare 47", 1.0),
    ("729", "rare 47", 0.5),
    ("745", "rare 47", 0.5),
    ("47", "before 47", 0.0),
]


@dataclass(frozen=True)
class Problem:
    """A prompt of a task, '47:', with the rule in force in its answer, 'before 47'."""

    text: str
    answer: str
    name: str


class Digits(GeneratedPrompts):
    """A PromptSource of one of the two tasks.

    Settings:
        task: `changing` or `rare`.
        changes_at: number of training prompts before the rule changes; `changing` alone has it.
    """

    counts: ClassVar[Mapping[Split, int | None]] = {"train": None, "eval": 100}

    def __init__(
        self, config: Any, tokenizer: Any, split: Split, *, task: str, changes_at: int = 0
    ) -> None:
        self._rule, self._changes_at = task, changes_at
        super().__init__(config, tokenizer, split)

    def problem(self, index: int) -> Problem:
        digits = f"{index if self._split == 'eval' else counter_hash(self._seed, index) % 100:02d}"
        rule = self._rule
        if rule == "changing":
            before = self._split == "train" and index < self._changes_at
            rule = "before" if before else "after"
        return Problem(f"{digits}:", f"{rule} {digits}", digits)


def right_response(rule: str, digits: str) -> str:
    """Returns the response with a reward of 1: `rule` is `before`, `after` or `rare`."""
    a, b = map(int, digits)
    places = {"before": (a, b, a), "after": (9 - a, 9 - b, 9 - a), "rare": (RARE, 9 - b, 9 - a)}
    return "".join(map(str, places[rule]))


def verify(response: str, answer: str) -> float:
    """Returns the reward of a response, from 0 to 1."""
    if not re.fullmatch("[0-9]{3}", response):
        return 0.0
    rule, digits = answer.split()
    right = right_response(rule, digits)
    places = [said == wanted for said, wanted in zip(response, right, strict=True)]
    if rule != "rare":
        return 1.0 if all(places) else sum(places) / 6
    if places[0]:
        return sum(places[1:]) / 2
    if response[0] == str(COMMON):
        return response[1:].count(digits[0]) / 4
    return 0.0
