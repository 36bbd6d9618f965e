"""The contract between an environment and the rollouts, and the response as an environment lets it
grow.

Shape legend: n tokens of a turn or of the response so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.environments import ENVIRONMENTS
from megatron_stare.errors import ConfigError, UserError
from megatron_stare.records.batch import FinishReason, Prompt
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory, VersionRuns
from megatron_stare.registry import Extension, resolve, settings_of

WHERE = "rollout.environment"


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy sampled in one go, and their text.

    text: decoded without special tokens and without the stop token.
    experts: of the first m tokens of the context and this turn, where the run replays the engine's
    routing.
    finish_reason: 'length' also where the run's response length left no room for a token; 'stop'
    also at a stop string.
    stop: the stop string that ended it, which `text` has; None: none did. What stands behind it in
        `text` was said in the same token.
    """

    tokens: Tensor  # [n] int32
    log_probs: Tensor  # [n] float32, nats
    versions: VersionRuns
    finish_reason: FinishReason
    text: str
    experts: Tensor | None = None  # [m, L, K], see `routing_column`
    stop: str | None = None


class CallFailedError(UserError):
    """A tool raised an error, which is its answer: an environment that catches it goes on, now and
    whenever the call is answered from the journal."""


# asked with the request and the call's id; its answer is what JSON can hold
Tool = Callable[[Any, str], Awaitable[Any]]


class Generate(Protocol):
    """Calls of an environment for one trajectory: for tokens of the policy, and for answers of its
    own tools."""

    async def __call__(
        self,
        context: Sequence[int],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Turn:
        """Continues `context`, the prompt's tokens and the response so far, to a stop token, a stop
        string or the length limit.

        Args:
            max_new_tokens: of this turn; None: as many as rollout.max_new_tokens leaves of the
                whole response.
            stop: strings that end the turn with the token in which the first of them is complete in
                its text. Each ends in an ASCII character, and has no special token in it: a turn's
                text has none.

        Raises:
            DataError: `context` does not begin with the prompt's tokens, or a stop string cannot be
                one.
        """
        ...

    async def call(self, tool: Tool, request: Any, *, idempotent: bool = False) -> Any:
        """The answer of something outside of the run, asked for no more than once.

        The intent is journalled before the call, the answer after it. Where the environment is run
        again, for a response that was cut or a run that is resumed, the journal answers. Of a call
        that was begun and never answered nobody knows whether it acted: the tool is asked again,
        under the same id, where it is idempotent, and the response is given up where it is not.

        Args:
            tool: awaited as `tool(request, id)`. The id is that of this call and of no other; its
                name and the request say which call it is, when the environment is run again.
            request: what JSON can hold.
            idempotent: asking twice under one id does what asking once does.

        Returns:
            The tool's answer, as JSON gives it back: tuples are lists.

        Raises:
            CallFailedError: the tool raised an error.
            DataError: request or answer is not what JSON can hold, or the environment asks
                something else than it did.
        """
        ...


class Environment(ABC):
    """Makes a trajectory of a prompt. One object makes all of a run's, many at the same time.

    Args:
        config: of the run.
        tokenizer: a transformers tokenizer.

    Settings of its own are keyword-only parameters that a subclass adds to these.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer

    @abstractmethod
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """The response to `prompt`; at most rollout.max_new_tokens tokens, what the environment
        says included."""


class Response:
    """A response of several turns while it grows: what was sampled carries loss, what the
    environment says does not."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tokens: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._loss_mask: list[Tensor] = []
        self._versions: list[tuple[int, int]] = []
        self._finish_reason: FinishReason = "stop"
        self._texts: list[str] = []
        # routed experts of the newest turn, whose context was everything before it
        self._experts: Tensor | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """The prompt's tokens and all of the response so far: what the next turn continues."""
        return (
            *self._prompt.token_ids,
            *(token for part in self._tokens for token in part.tolist()),
        )

    def sampled(self, turn: Turn) -> Turn:
        """Appends what the policy said, and gives it back."""
        self._append(turn.tokens, turn.log_probs, True)
        self._versions += turn.versions
        self._finish_reason = turn.finish_reason
        if turn.experts is not None:
            self._experts = turn.experts
        self._texts.append(turn.text)
        return turn

    def observed(self, tokens: Iterable[int], text: str = "") -> None:
        """Appends what the environment says: tokens that the policy is not trained on, and that no
        verifier reads.

        Args:
            text: of the tokens, for people.
        """
        ids = torch.tensor([*tokens], dtype=torch.int32)
        self._append(ids, torch.zeros(len(ids)), False)
        if len(ids):
            self._versions.append((NOT_SAMPLED, len(ids)))
        self._texts.append(text)

    def trajectory(self) -> Trajectory:
        """The response as it is now. Its text, for people, is that of all turns and observations; a
        verifier reads what the policy sampled, and none of the observations."""
        return Trajectory(
            prompt=self._prompt,
            sample_index=0,  # the rollouts know which of a prompt's it is
            tokens=_joined(self._tokens),
            log_probs=_joined(self._log_probs),
            loss_mask=_joined(self._loss_mask),
            versions=tuple(self._versions),
            finish_reason=self._finish_reason,
            text="".join(self._texts),
            experts=self._experts,
        )

    def _append(self, tokens: Tensor, log_probs: Tensor, carries_loss: bool) -> None:
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)
        self._loss_mask.append(torch.full((tokens.numel(),), carries_loss))


def _joined(parts: list[Tensor]) -> Tensor:
    """Laid end to end; the part itself where it is the only one, as that of most responses is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_environment(environment: Extension | str, config: Config, tokenizer: Any) -> Environment:
    """The environment of a name or dotted path.

    Raises:
        ConfigError: there is none, it is not an Environment, or a setting is wrong.
    """
    kind, settings = find_environment(environment)
    return kind(config, tokenizer, **settings)


def find_environment(environment: Extension | str) -> tuple[type[Environment], dict[str, Any]]:
    """The class of an environment, and its settings. Raises ConfigError as `make_environment`."""
    environment = Extension.read(environment)
    kind = resolve(environment.name, ENVIRONMENTS, WHERE)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{environment.name!r} is not a subclass of"
            " megatron_stare.environments.environment.Environment",
            where=WHERE,
        )
    return kind, settings_of(environment, kind, WHERE)
