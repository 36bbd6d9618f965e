"""The contract between an environment and the rollouts, and the response that an environment builds
up.

Shape legend: n tokens of a turn or of the response so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.environments import ENVIRONMENTS
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.records.batch import FinishReason, Prompt
from megatron_stare.records.trajectory import NOT_SAMPLED, Branch, Trajectory, VersionRuns
from megatron_stare.registry import Extension, resolve, settings_of

WHERE = "rollout.environment"


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy sampled in one call, and their text.

    text: text of the tokens, decoded without special tokens and without the stop token.
    experts: the engine's experts for the first tokens of context and turn together. The tensor's
        first dimension m is the number of these tokens. None if the run does not replay the
        engine's routing.
    finish_reason: the value is 'length' also if the response's token limit left no room for a
        token, and 'stop' also if a stop string ended the turn.
    stop: the stop string that ended the turn; None: no stop string ended the turn. `text` contains
        the stop string, and after the stop string the rest of the last token.
    """

    tokens: Tensor  # [n] int32
    log_probs: Tensor  # [n] float32, nats
    versions: VersionRuns
    finish_reason: FinishReason
    text: str
    experts: Tensor | None = None  # [m, L, K], see `routing_column`
    stop: str | None = None


class CallFailedError(UserError):
    """Error of a tool, recorded in the journal as the answer to the call. An environment may catch
    the CallFailedError and continue. When the journal later replays the call, the same error is
    raised, and the environment continues in the same way."""


# called with the request and the call's id; returns a value that JSON can hold
Tool = Callable[[Any, str], Awaitable[Any]]


class Generate(Protocol):
    """Calls that an environment makes for one trajectory: to the policy for tokens, and to its own
    tools for answers."""

    async def __call__(
        self,
        context: Sequence[int],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        branch: Branch | None = None,
    ) -> Turn:
        """Continues `context`, the prompt's tokens and the response so far, until a stop token, a
        stop string or the length limit.

        Args:
            branch: the branch that is continued, `Response.branch`; None: the first. `context` is
                then the branch's context and the tokens since.
            max_new_tokens: limit of this turn; None: what rollout.max_new_tokens leaves for the
                whole response.
            stop: strings; the token that completes the first of them in the text ends the turn.
                Each ends in an ASCII character and contains no special token, because a turn's text
                has none.

        Raises:
            DataError: `context` does not begin with the prompt's tokens or the branch's context,
                or a stop string is invalid.
        """
        ...

    async def call(self, tool: Tool, request: Any, *, idempotent: bool = False) -> Any:
        """Returns the answer of a tool outside of the run. Calls the tool at most once, unless the
        tool is idempotent.

        The journal records the intent before the call and the answer after it. If the environment
        runs again, because its response was cut or the run was resumed, the journal returns the
        recorded answer and the tool is not called. If a call was begun but never answered, the tool
        may or may not have acted. If the tool is idempotent, an unanswered call is repeated under
        the same id. If the tool is not idempotent, the rollouts discard a response with an
        unanswered call.

        Args:
            tool: awaited as `tool(request, id)`, with an id unique to this call. When the
                environment runs again, the tool's name and the request identify the call.
            request: a value that JSON can hold.
            idempotent: True: two calls under one id have the same effect as one.

        Returns:
            The tool's answer after a round trip through JSON: tuples become lists.

        Raises:
            CallFailedError: the tool raised an error.
            DataError: JSON cannot hold the request or answer, or the environment makes another call
                than in its first run.
        """
        ...


class Environment(ABC):
    """Makes a trajectory from a prompt. One object makes all trajectories of a run, many
    concurrently.

    Args:
        config: the run's configuration.
        tokenizer: a transformers tokenizer.

    A subclass adds its own settings as keyword-only parameters.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer

    @classmethod
    def tool_schemas(cls, settings: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        """Returns the schemas of the tools that the chat template tells the policy of; None: there
        are no tools.

        Args:
            settings: the environment's settings, checked.
        """
        return None

    @classmethod
    def branches(cls, settings: Mapping[str, Any]) -> bool:
        """Tells whether a response may have several branches (`Response.begin_branch`), which some
        methods cannot train on.

        Args:
            settings: the environment's settings, checked.
        """
        return False

    @abstractmethod
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Returns the response to `prompt`, at most rollout.max_new_tokens tokens including those
        of the environment."""


class Response:
    """A multi-turn response under construction: sampled tokens carry loss, the environment's tokens
    do not."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._loss_mask: list[Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._finish_reason: FinishReason = "stop"
        self._texts: list[str] = []
        self._branches: list[Branch] = []
        # routed experts of the newest turn, which cover everything before it too
        self._experts: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens so far, those of the environment included."""
        return sum(part.numel() for part in self._tokens)

    @property
    def branch(self) -> Branch | None:
        """The newest branch; None: the first, whose context is the prompt."""
        return self._branches[-1] if self._branches else None

    @property
    def context(self) -> tuple[int, ...]:
        """The tokens from which the next turn continues: of the newest branch, its context and what
        followed; of the first branch, the prompt and the response so far."""
        tokens = [token for part in self._tokens for token in part.tolist()]
        if (branch := self.branch) is None:
            return (*self._prompt.token_ids, *tokens)
        return (*branch.context, *tokens[branch.start :])

    def begin_branch(self, context: Iterable[int], text: str = "") -> Branch:
        """Begins a new branch, which the next tokens belong to, and returns it.

        Nothing of the context carries loss. The class's `branches` must say True.

        Args:
            context: ids of at least one token: a rewritten history, or an agent's task.
            text: text of the context, for people.
        """
        self._branches.append(Branch(self.length, tuple(context)))
        self._texts.append(text)
        return self._branches[-1]

    def sampled(self, turn: Turn) -> Turn:
        """Appends a turn of the policy, and returns it."""
        self._append(turn.tokens, turn.log_probs, True)
        self._versions += turn.versions
        self._finish_reason = turn.finish_reason
        if turn.experts is not None:
            self._experts = turn.experts
        self._texts.append(turn.text)
        return turn

    def observed(self, tokens: Iterable[int], text: str = "") -> None:
        """Appends tokens of the environment, which the policy is not trained on and no verifier
        reads.

        Args:
            text: text of the tokens, for people.
        """
        ids = torch.tensor([*tokens], dtype=torch.int32)
        self._append(ids, torch.zeros(len(ids)), False)
        if len(ids):
            self._versions.append((NOT_SAMPLED, len(ids)))
        self._texts.append(text)

    def trajectory(self) -> Trajectory:
        """Returns the response so far. The trajectory's `text` is for people and includes turns and
        observations. A verifier reads only what the policy sampled."""
        return Trajectory(
            prompt=self._prompt,
            sample_index=0,  # the rollouts set it
            tokens=_joined(self._tokens),
            log_probs=_joined(self._log_probs),
            loss_mask=_joined(self._loss_mask),
            versions=tuple(self._versions),
            finish_reason=self._finish_reason,
            text="".join(self._texts),
            branches=tuple(self._branches),
            experts=self._experts,
        )

    def _append(self, tokens: Tensor, log_probs: Tensor, carries_loss: bool) -> None:
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)
        self._loss_mask.append(torch.full((tokens.numel(),), carries_loss))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates parts; a single part, the usual case, is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_environment(environment: Extension | str, config: Config, tokenizer: Any) -> Environment:
    """Builds the environment of a name or dotted path.

    Raises:
        ConfigError: no such environment, the class is not an Environment, or a setting is wrong.
    """
    kind, settings = find_environment(environment)
    return kind(config, tokenizer, **settings)


def find_environment(environment: Extension | str) -> tuple[type[Environment], dict[str, Any]]:
    """Returns the class of an environment, and its settings. Raises ConfigError like
    `make_environment`."""
    environment = Extension.read(environment)
    kind = resolve(environment.name, ENVIRONMENTS, WHERE)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{environment.name!r} is not a subclass of"
            " megatron_stare.environments.environment.Environment",
            where=WHERE,
        )
    return kind, settings_of(environment, kind, WHERE)
