"""Stores the progress of a response: first the policy's answers so far, and later the verified
trajectory. If a response is cut at the end of a round, the tokens that are already sampled are
kept.

An environment is a coroutine, which no checkpoint can store. A checkpoint therefore stores the
policy's answers, not the environment. To continue a response, the environment runs again from the
beginning. The environment receives the stored answers again and continues after the last stored
answer. The answers of tools are stored too, in a journal (calls.py).

Shape legend: n is the number of tokens of one answer so far.
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
    """Exception that ends the environment of a response when the response is cut. In each round, a
    response may grow by at most `partial.tokens` tokens. A response that is still unfinished at
    this limit is cut. A later round continues the response. Like CancelledError, ResponseCut does
    not derive from Exception. An environment that catches Exception therefore does not catch
    ResponseCut."""


class ResponseGivenUp(BaseException):
    """Exception that ends the environment of a response that cannot continue. The cause is a tool
    call that began before the environment ran again. The outcome of this call is unknown. The call
    is not idempotent, so the call must not be repeated."""


_NO_TOKENS, _NO_LOG_PROBS = torch.zeros(0, dtype=torch.int32), torch.zeros(0)


@dataclass
class Answer:
    """The policy's answer to one `generate` call of an environment. An answer may consist of
    several parts, which engines sample one after the other."""

    tokens: Tensor = _NO_TOKENS  # [n] int32
    log_probs: Tensor = _NO_LOG_PROBS  # [n] float32, nats
    versions: VersionRuns = ()
    finish_reason: FinishReason | None = None  # None: unfinished
    text: str = ""  # empty until the answer is finished
    # routed experts of the newest part and all its context; see `routing_column`
    experts: Tensor | None = None
    stop: str | None = None  # stop string that ends the finished answer

    def __len__(self) -> int:
        # here and elsewhere numel(), because len() of a tensor takes ten times as long
        return self.tokens.numel()

    def add(self, part: GenerateResult) -> None:
        """Appends the newest part of the answer, which an engine has just sampled, to the earlier
        parts."""
        whole = not len(self)
        self.tokens = part.output_ids if whole else torch.cat([self.tokens, part.output_ids])
        self.log_probs = (
            part.output_log_probs if whole else torch.cat([self.log_probs, part.output_log_probs])
        )
        self.versions = joined(self.versions, part.versions)
        self.experts = part.experts

    def turn(self) -> Turn:
        """Returns the finished answer as the Turn that environments receive."""
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
    """Stores the state of one response until the run trains on the response. A stored response is
    in progress, cut or finished. A later round continues each response that was cut. A finished
    response waits until the run trains on the response.

    Attributes:
        `step`: step in which the response began. The sampling noise of every token of the response
            depends on `step`, even if the token is sampled in a later step.
        `answers`: the policy's answers, one for each call that the environment made to `generate`.
            The last answer may be incomplete because the response was cut.
        `calls`: tool calls of the environment, in order. Each entry of `calls` is a pair of the
            request's checksum and the call's id.
        `context`: checksum of the context of the last answer, if the last answer is incomplete.
        `replica`: index of the replica that sampled the last tokens. Checkpoints do not store the
            index of the replica.
        `trajectory`: the finished, verified response.
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
        """Identifies the response across processes."""
        return ResponseKey(self.step, self.prompt.cursor, self.sample_index)

    def called(self, number: int, asked: str) -> str | None:
        """Returns the id of the tool call with index `number`, or None if the environment has not
        begun this call before.

        Raises:
            DataError: the call `number` of the earlier run had another request.
        """
        if number >= len(self.calls):
            return None
        known, call = self.calls[number]
        if known != text_checksum(asked):
            raise self.not_repeated()
        return call

    def begin_call(self, number: int, asked: str, call: str) -> None:
        """Stores the tool call with index `number`, unless the call is already stored."""
        if number >= len(self.calls):
            self.calls.append((text_checksum(asked), call))

    def copy(self) -> UnderWay:
        """Returns a copy that does not change when this response grows. The copy shares the token
        tensors with this response."""
        return replace(
            self, answers=[replace(answer) for answer in self.answers], calls=[*self.calls]
        )

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of the response so far. For an unfinished response, this
        number includes only the tokens of the policy's answers."""
        return sum(map(len, self.answers)) if self.trajectory is None else len(self.trajectory)

    def answer(self, call: int, context: Sequence[int]) -> Answer:
        """Returns the stored answer to one call of `generate`, or a new, empty answer if none is
        stored. The argument `call` is the index of the call.

        Raises:
            DataError: the stored answer was cut, and its context differs from `context`.
        """
        if call < len(self.answers):
            if call == len(self.answers) - 1 and self.context not in ("", checksum(context)):
                raise self.not_repeated()
            return self.answers[call]
        self.answers.append(Answer())
        return self.answers[call]

    def cut(self, context: Sequence[int]) -> ResponseCut:
        """Stores the context's checksum. Returns the exception to raise."""
        self.context = checksum(context)
        return ResponseCut()

    def finish(self, trajectory: Trajectory) -> None:
        """Stores the finished trajectory. Drops the answers and the calls, because a finished
        response does not need them. The trajectory contains the answers' tokens."""
        self.trajectory, self.answers, self.calls, self.context = trajectory, [], [], ""

    def give_up(self) -> Trajectory:
        """Finishes the response as a trajectory without tokens and without a reward."""
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
        """Returns a DataError. The error says that an environment ran again and received the same
        answers as before, but did not repeat its earlier messages or tool calls."""
        return DataError(
            "the environment did not repeat its messages of before the response was cut",
            where=f"{WHERE}, prompt {self.prompt.id}",
            fix=(
                "make its messages depend only on the prompt and the answers it was given, and"
                " call its tools by generate.call; or set partial.tokens=null"
            ),
        )


def joined(first: VersionRuns, then: VersionRuns) -> VersionRuns:
    """Concatenates two lists of pairs (weight version, number of tokens). The last pair of the
    first list and the first pair of the second list become one pair if both pairs have the same
    version."""
    if first and then and first[-1][0] == then[0][0]:
        return (*first[:-1], (then[0][0], first[-1][1] + then[0][1]), *then[1:])
    return (*first, *then)


def checksum(tokens: Sequence[int]) -> str:
    """Returns the hexadecimal SHA-256 of token ids. The checksum is the same on every machine."""
    return hashlib.sha256(np.asarray(tokens, dtype="<i4").tobytes()).hexdigest()


def text_checksum(text: str) -> str:
    """Returns the hexadecimal SHA-256 of a text. The checksum is the same on every machine."""
    return hashlib.sha256(text.encode()).hexdigest()
