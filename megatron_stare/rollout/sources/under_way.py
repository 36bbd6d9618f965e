"""A response on its way from its prompt to its verdict, and what is kept of it where it is cut.

An environment is a coroutine, which no checkpoint can hold. What is kept is what the policy
answered it: a response that is continued runs its environment from the beginning, gives it the same
answers again, and goes on where they end. What its tools answered it is kept too, in a journal
(calls.py).

Shape legend: n tokens of one answer so far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from megatron_stare.environments.environment import WHERE, Turn
from megatron_stare.errors import DataError
from megatron_stare.records.batch import FinishReason, Prompt
from megatron_stare.records.trajectory import Trajectory, VersionRuns
from megatron_stare.rollout.engines.engine import GenerateResult
from megatron_stare.rollout.sources.calls import ResponseKey


class ResponseCut(BaseException):
    """Ends an environment whose response has grown by as much as it may for now. Like a
    cancellation it is no Exception, so that no environment takes it for a failure of its own."""


class ResponseGivenUp(BaseException):
    """Ends an environment whose response cannot be gone on with: nobody knows what became of a call
    of its own."""


_NO_TOKENS, _NO_LOG_PROBS = torch.zeros(0, dtype=torch.int32), torch.zeros(0)


@dataclass
class Answer:
    """Answer of the policy to one call of an environment's `generate`, as it grows."""

    tokens: Tensor = _NO_TOKENS  # [n] int32
    log_probs: Tensor = _NO_LOG_PROBS  # [n] float32, nats
    versions: VersionRuns = ()
    finish_reason: FinishReason | None = None  # None: it goes on
    text: str = ""  # once it is whole
    # routed experts of the newest part, whose context was everything before it; see
    # `routing_column`
    experts: Tensor | None = None
    stop: str | None = None  # once it is whole, the stop string that it ends with

    def __len__(self) -> int:
        # numel() here and elsewhere: len() of a tensor takes ten times as long
        return self.tokens.numel()

    def add(self, part: GenerateResult) -> None:
        """Appends what an engine sampled next."""
        whole = not len(self)
        self.tokens = part.output_ids if whole else torch.cat([self.tokens, part.output_ids])
        self.log_probs = (
            part.output_log_probs if whole else torch.cat([self.log_probs, part.output_log_probs])
        )
        self.versions = joined(self.versions, part.versions)
        self.experts = part.experts

    def turn(self) -> Turn:
        """The whole answer, as environments see it."""
        assert self.finish_reason is not None
        return Turn(
            self.tokens,
            self.log_probs,
            self.versions,
            self.finish_reason,
            self.text,
            self.experts,
            self.stop,
        )


@dataclass
class UnderWay:
    """A response that is being made, or waits to be continued or to be trained on.

    Attributes:
        step: that it was begun in, which keys its sampling noise to its end.
        answers: of the policy, by call of the environment's `generate`; the last may be cut.
        calls: of the environment's tools, in their order: checksum of what is asked, and the call's
            id.
        context: checksum of what stood before the last answer, where that is cut.
        replica: that gave the last tokens, in this process.
        trajectory: of a response that is finished and verified.
    """

    prompt: Prompt
    sample_index: int
    step: int
    answers: list[Answer] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    context: str = ""
    replica: int | None = None
    trajectory: Trajectory | None = None

    @property
    def key(self) -> ResponseKey:
        """Which response it is, wherever it is made."""
        return ResponseKey(self.step, self.prompt.cursor, self.sample_index)

    def called(self, number: int, asked: str) -> str | None:
        """The id of the environment's call of this number, where it was begun before.

        Raises:
            DataError: something else was asked then.
        """
        if number >= len(self.calls):
            return None
        known, call = self.calls[number]
        if known != text_checksum(asked):
            raise self.not_repeated()
        return call

    def begin_call(self, number: int, asked: str, call: str) -> None:
        """Keeps that the environment's call of this number is made."""
        if number >= len(self.calls):
            self.calls.append((text_checksum(asked), call))

    def copy(self) -> UnderWay:
        """One that does not grow with this; their tokens are the same memory."""
        return replace(
            self, answers=[replace(answer) for answer in self.answers], calls=[*self.calls]
        )

    @property
    def tokens(self) -> int:
        """Tokens of the response so far, without those that its environment said since the last
        answer."""
        return sum(map(len, self.answers)) if self.trajectory is None else len(self.trajectory)

    def answer(self, call: int, context: Sequence[int]) -> Answer:
        """The answer to this call of `generate`: what is kept of it, or an empty one.

        Raises:
            DataError: it was cut behind another context.
        """
        if call < len(self.answers):
            if call == len(self.answers) - 1 and self.context not in ("", checksum(context)):
                raise self.not_repeated()
            return self.answers[call]
        self.answers.append(Answer())
        return self.answers[call]

    def cut(self, context: Sequence[int]) -> ResponseCut:
        """Keeps what there is; to be raised."""
        self.context = checksum(context)
        return ResponseCut()

    def finish(self, trajectory: Trajectory) -> None:
        """The response is whole; what its environment was answered is in it."""
        self.trajectory, self.answers, self.calls, self.context = trajectory, [], [], ""

    def give_up(self) -> Trajectory:
        """The response ends here, as one without a token and without a reward."""
        nothing = Trajectory(
            prompt=self.prompt,
            sample_index=self.sample_index,
            tokens=_NO_TOKENS,
            log_probs=_NO_LOG_PROBS,
            loss_mask=torch.zeros(0, dtype=torch.bool),
            versions=(),
            finish_reason="abort",
            reward_status="given_up",
        )
        self.finish(nothing)
        return nothing

    def not_repeated(self) -> DataError:
        """Error for an environment that does otherwise when it is given the same answers again."""
        return DataError(
            "the environment did not repeat its messages of before the response was cut",
            where=f"{WHERE}, prompt {self.prompt.id}",
            fix=(
                "make its messages depend only on the prompt and the answers it was given, and"
                " call its tools by generate.call; or set partial.tokens=null"
            ),
        )


def joined(first: VersionRuns, then: VersionRuns) -> VersionRuns:
    """The runs of both, one behind the other, as few as possible."""
    if first and then and first[-1][0] == then[0][0]:
        return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])
    return (*first, *then)


def checksum(tokens: Sequence[int]) -> str:
    """SHA-256 of token ids, hexadecimal; the same on every machine."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def text_checksum(text: str) -> str:
    """SHA-256 of a text, hexadecimal; the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()
