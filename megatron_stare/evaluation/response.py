"""One response of an evaluation, as it is counted and kept, and which responses of a problem give
the same answer.

A `Response` is what a trajectory is without its tokens. Two answers are the same where their normal
forms are the same characters, or where the verifier takes a response with the one for right when
the other is its reference. Classes are built in the order of the samples, each by its first answer,
so they do not depend on what finished first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.records.batch import FinishReason
from megatron_stare.records.trajectory import RewardStatus, Trajectory

# judges (response, reference) pairs: whether each is right
Judged = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
Classes = list[int | None]
"""The class of each response, numbered from 0 as they come; None: it gives no answer."""

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Response:
    """A response and its verdict.

    prompt: cursor of its prompt, which numbers the prompts of a task from 0.
    sample: its number among the responses to the prompt.
    text: what the policy said, without the words of an environment.
    tokens: of the response, the stop token and what an environment wrote included.
    answer: what it answers, in its verifier's normal form; "": nothing; None: the verifier does not
    say.
    """

    prompt: int
    sample: int
    text: str
    tokens: int
    finish_reason: FinishReason
    reward: float | None
    status: RewardStatus
    answer: str | None = None

    @property
    def right(self) -> bool:
        """Its reward is above one half; a response whose verifier failed is wrong."""
        return (self.reward or 0.0) > 0.5

    @classmethod
    def of(cls, trajectory: Trajectory) -> Response:
        """Takes what counts of a verified trajectory."""
        return cls(
            prompt=trajectory.prompt.cursor,
            sample=trajectory.sample_index,
            text=trajectory.said,
            tokens=len(trajectory),
            finish_reason=trajectory.finish_reason,
            reward=trajectory.reward,
            status=trajectory.reward_status,
            answer=trajectory.answer,
        )

    def record(self) -> dict[str, Any]:
        """Returns the response as a line of JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Response:
        """Reads what `record` gave; other keys are passed over. Raises KeyError where one is
        missing."""
        return cls(**{each.name: record[each.name] for each in dataclasses.fields(cls)})


def answer_classes(problems: Sequence[Sequence[Response]], judged: Judged) -> list[Classes]:
    """The classes of every problem's responses.

    Args:
        judged: asked once, of all pairs of answers that only the verifier can tell apart. Two
            integers in normal form are different if they are written differently.
    """
    firsts = [_firsts(responses) for responses in problems]
    pairs = [
        (number, one, other)
        for number, answers in enumerate(firsts)
        for at, other in enumerate(answers)
        for one in list(answers)[:at]
        if not (_INTEGER.fullmatch(one) and _INTEGER.fullmatch(other))
    ]
    verdicts = (
        judged([(firsts[number][other].text, one) for number, one, other in pairs]) if pairs else []
    )
    same = {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict}
    return [
        _classes(number, responses, list(firsts[number]), same)
        for number, responses in enumerate(problems)
    ]


def _firsts(responses: Sequence[Response]) -> dict[str, Response]:
    """The first response that gives each answer."""
    found: dict[str, Response] = {}
    for response in responses:
        if response.answer:
            found.setdefault(response.answer, response)
    return found


def _classes(
    number: int,
    responses: Sequence[Response],
    answers: Sequence[str],
    same: set[tuple[int, str, str]],
) -> Classes:
    heads: list[str] = []
    class_of: dict[str, int] = {}
    for answer in answers:
        known = next((at for at, head in enumerate(heads) if (number, head, answer) in same), None)
        if known is None:
            known = len(heads)
            heads.append(answer)
        class_of[answer] = known
    return [class_of[response.answer] if response.answer else None for response in responses]
