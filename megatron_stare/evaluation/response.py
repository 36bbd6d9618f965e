"""One response of an evaluation, as it is counted and kept: what a trajectory is without its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_stare.records.batch import FinishReason
from megatron_stare.records.trajectory import RewardStatus, Trajectory


@dataclass(frozen=True)
class Response:
    """A response and its verdict.

    prompt: cursor of its prompt, which numbers the prompts of a task from 0.
    sample: its number among the responses to the prompt.
    text: what the policy said, without the words of an environment.
    tokens: of the response, the stop token and what an environment wrote included.
    answer: what it answers, in its verifier's normal form; "": nothing; None: the verifier does not say.
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
        """What counts of a verified trajectory."""
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
        """As a line of JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Response:
        """Of what `record` gave; other keys are passed over. Raises KeyError where one is missing."""
        return cls(**{each.name: record[each.name] for each in dataclasses.fields(cls)})
