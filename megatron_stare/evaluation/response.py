"""Defines a response of an evaluation, and groups the responses to a problem into classes with the
same answer.

A `Response` is a trajectory without its tokens. Two answers count as the same if their normal forms
are equal. Two answers also count as the same if the verifier accepts the later answer as right,
with the earlier answer as the reference answer. Answers are compared in the order of the responses'
sample indices, so the classes do not depend on which response finished first. The earliest answer
of a class represents the class.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_stare.records.batch import FinishReason
from megatron_stare.records.trajectory import RewardStatus, Trajectory

# takes (response, reference) pairs and returns whether each response is right
Judged = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
Classes = list[int | None]
"""Class of each response. Classes are numbered from 0 in order of appearance. None: the response
has no answer."""

_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Response:
    """A response and its verdict.

    `prompt`: cursor of the prompt, which is the index of the prompt in the evaluation task, counted
        from 0.
    `sample`: index of the response among all responses to the same prompt.
    `text`: text that the policy wrote, without text of an environment.
    `tokens`: length of the response, including the stop token and the environment's tokens.
    `answer`: the answer in the verifier's normal form. `answer` is "" if the response has no
        answer, and None if the verifier does not return answers.
    `calls`: tool calls, as in Trajectory, but without the time that each took. Two evaluations with
        the same responses therefore have equal records.
    """

    prompt: int
    sample: int
    text: str
    tokens: int
    finish_reason: FinishReason
    reward: float | None
    status: RewardStatus
    answer: str | None = None
    calls: Sequence[Mapping[str, Any]] = ()

    @property
    def right(self) -> bool:
        """Returns True if the reward is above one half. Returns False if the verifier failed."""
        return (self.reward or 0.0) > 0.5

    @classmethod
    def of(cls, trajectory: Trajectory) -> Response:
        """Builds a response from a verified trajectory."""
        return cls(
            prompt=trajectory.prompt.cursor,
            sample=trajectory.sample_index,
            text=trajectory.said,
            tokens=len(trajectory),
            finish_reason=trajectory.finish_reason,
            reward=trajectory.reward,
            status=trajectory.reward_status,
            answer=trajectory.answer,
            calls=[
                {key: value for key, value in call.items() if key != "seconds"}
                for call in trajectory.calls
            ],
        )

    def record(self) -> dict[str, Any]:
        """Returns the response as a dict that can be written as a line of JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Response:
        """Builds a response from a dict that `record` returned. Ignores unknown keys. Raises
        KeyError if a key is missing, except for `calls`, which older files lack."""
        record = {"calls": (), **record}
        return cls(**{each.name: record[each.name] for each in dataclasses.fields(cls)})


def answer_classes(problems: Sequence[Sequence[Response]], judged: Judged) -> list[Classes]:
    """Returns one list per problem, with the answer class of each response to the problem.

    Args:
        judged: called once, with all pairs of answers that only the verifier can compare. If both
            answers are integers in normal form, their texts are compared without the verifier.
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
    """Returns a dict from each answer to the first response that gives this answer."""
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
