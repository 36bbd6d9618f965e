"""Defines the interface between environments and rollouts, and the `Response` that an environment
builds.

Shape legend: n is the number of tokens of a turn or of the response so far.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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
    """Tokens that the policy sampled in one call, and the text of these tokens.

    `text`: text of the tokens, decoded without special tokens and without the stop token.
    `experts`: the experts that the engine chose for the first m tokens, counted from the beginning
        of the turn's context. `experts` has m rows, one for each of the first m tokens. `experts`
        is None if the run does not replay the engine's routing.
    `finish_reason`: 'length' if a token limit ended the turn, or if a token limit left no room for
        a first token. 'stop' if a stop token or a stop string ended the turn.
    `stop`: the stop string that ended the turn, or None. `text` includes the stop string, and also
        any text that the last token contains after the stop string.
    """

    tokens: Tensor  # [n] int32
    log_probs: Tensor  # [n] float32, nats
    versions: VersionRuns
    finish_reason: FinishReason
    text: str
    experts: Tensor | None = None  # [m, L, K], see `routing_column`
    stop: str | None = None


class CallFailedError(UserError):
    """Raised if a tool raised an error. The journal records the error as the answer to the call. An
    environment is allowed to catch the CallFailedError and to continue. In a replay, the journal
    raises the same error again, so that the environment continues in the same way."""


# called with the request and the call's id; returns a value that JSON can hold
Tool = Callable[[Any, str], Awaitable[Any]]


class Generate(Protocol):
    """Interface through which an environment samples tokens from the policy and calls tools. Each
    trajectory has its own Generate object."""

    async def __call__(
        self,
        context: Sequence[int],
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        branch: Branch | None = None,
    ) -> Turn:
        """Samples a turn that continues `context`. The turn ends at a stop token, a stop string or
        the length limit. `context` is the token sequence of the prompt and the response so far.

        Args:
            branch: the branch to continue, from `Response.branch`; None: the first branch. For a
                later branch, `context` consists of the branch's context and the tokens after it.
            max_new_tokens: token limit of this turn; None: the tokens that remain for the response
                under rollout.max_new_tokens.
            stop: stop strings. The token that completes the first stop string in the text ends the
                turn. A stop string must end in an ASCII character. A stop string must not contain a
                special token, because the text of a turn contains no special tokens.

        Raises:
            DataError: `context` does not begin with the prompt's tokens or the branch's context,
                or a stop string is invalid.
        """
        ...

    async def call(self, tool: Tool, request: Any, *, idempotent: bool = False) -> Any:
        """Calls a tool and returns the tool's answer. If the tool is not idempotent, each call is
        made at most once, even if the environment runs again for the same response.

        Before the call, the journal records the intent to call the tool. After the call, the
        journal records the answer. An environment runs again for a prompt if the response was
        interrupted or the run was resumed. When the environment runs again, the journal returns
        each recorded answer without a call of the tool. If the journal contains no answer to a
        recorded call, nobody knows whether the tool acted. An unanswered call of an idempotent tool
        is repeated with the same call id. If a tool is not idempotent, an unanswered call of the
        tool ends the environment's run for this response, and the response is discarded.

        Args:
            tool: awaited as `tool(request, id)`, where `id` is unique to this call. When the
                environment runs again, the tool's name and the request identify the call.
            request: a value that JSON can hold.
            idempotent: True if two calls with the same id have the same effect as one call.

        Returns:
            The tool's answer after a round trip through JSON, which turns tuples into lists.

        Raises:
            CallFailedError: the tool raised an error.
            DataError: JSON cannot hold the request or the answer, or the environment makes a
                different call than in its first run.
        """
        ...


class Environment(ABC):
    """Makes trajectories from prompts. One Environment object makes all trajectories of a run, many
    of them at the same time. All training steps of a run use one event loop. An evaluation that
    runs at the same time as training uses another event loop.

    Args:
        config: the run's configuration.
        tokenizer: a transformers tokenizer.

    A subclass adds its own settings as keyword-only parameters.

    `judges`: true if the environment itself sets `reward` and `reward_status` of its trajectories.
        The setting `reward.verifier` must then be `environment`.
    """

    judges: ClassVar[bool] = False

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer

    @classmethod
    def tool_schemas(cls, settings: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
        """Returns a list with one schema for each tool of the environment. The chat template shows
        these schemas to the policy. Returns None if the environment has no tools.

        Args:
            settings: the environment's settings, checked.
        """
        return None

    @classmethod
    def branches(cls, settings: Mapping[str, Any]) -> bool:
        """Returns True if a response can have several branches (`Response.begin_branch`). Some
        training methods do not support responses with several branches.

        Args:
            settings: the environment's settings, checked.
        """
        return False

    @abstractmethod
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Returns the response to `prompt`. The response has at most rollout.max_new_tokens tokens;
        tokens that the environment adds count too."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Stops everything that the environment started, such as servers. Idempotent."""


class Response:
    """Response that an environment builds turn by turn. The loss counts the tokens that the policy
    sampled, and ignores the tokens that the environment adds."""

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
        """Number of tokens in the response so far, including tokens that the environment added."""
        return sum(part.numel() for part in self._tokens)

    @property
    def branch(self) -> Branch | None:
        """The newest branch of the response. `branch` is None while the response has only its first
        branch, whose context is the prompt."""
        return self._branches[-1] if self._branches else None

    @property
    def context(self) -> tuple[int, ...]:
        """Token ids of the context, which the next turn continues. In the first branch, the context
        consists of the prompt and the response so far. In a later branch, the context consists of
        the branch's own context and the tokens that were sampled or added after the branch
        began."""
        tokens = [token for part in self._tokens for token in part.tolist()]
        if (branch := self.branch) is None:
            return (*self._prompt.token_ids, *tokens)
        return (*branch.context, *tokens[branch.start :])

    def begin_branch(self, context: Iterable[int], text: str = "") -> Branch:
        """Begins a new branch and returns it. All tokens that are appended afterwards belong to the
        new branch.

        The loss ignores the tokens of the new branch's context. An environment that begins branches
        must return True from its method `branches`.

        Args:
            context: ids of at least one token, for example a rewritten history or an agent's task.
            text: text of the context, for display only.
        """
        self._branches.append(Branch(self.length, tuple(context)))
        self._texts.append(text)
        return self._branches[-1]

    def sampled(self, turn: Turn) -> Turn:
        """Appends a turn of the policy, and returns the turn."""
        self._append(turn.tokens, turn.log_probs, True)
        self._versions += turn.versions
        self._finish_reason = turn.finish_reason
        if turn.experts is not None:
            self._experts = turn.experts
        self._texts.append(turn.text)
        return turn

    def observed(self, tokens: Iterable[int], text: str = "") -> None:
        """Appends tokens that the environment adds to the response. The loss and the verifiers
        ignore all tokens that the environment adds.

        Args:
            text: text of the tokens, for display only.
        """
        ids = torch.tensor([*tokens], dtype=torch.int32)
        self._append(ids, torch.zeros(len(ids)), False)
        if len(ids):
            self._versions.append((NOT_SAMPLED, len(ids)))
        self._texts.append(text)

    def trajectory(self) -> Trajectory:
        """Returns the response so far as a Trajectory. The trajectory's `text` is for display and
        contains the policy's text and the environment's text. A verifier reads only the policy's
        text."""
        return Trajectory(
            prompt=self._prompt,
            sample_index=0,  # the rollouts set it
            tokens=_joined(self._tokens, torch.int32),
            log_probs=_joined(self._log_probs, torch.float32),
            loss_mask=_joined(self._loss_mask, torch.bool),
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


def unusable_stop(stop: str, tokenizer: Any) -> tuple[str, str] | None:
    """Checks whether `stop` is suitable as a stop string. A suitable stop string ends in an ASCII
    character and contains no special token. If `stop` is unsuitable, returns two texts: the reason,
    and advice on how to change `stop`. Returns None if `stop` is suitable."""
    if not stop or not stop[-1].isascii():
        return (
            "does not end in an ASCII character",
            "end it before that character: no single token is certain to complete it",
        )
    special = next((token for token in tokenizer.all_special_tokens if token in stop), None)
    if special is not None:
        return (
            f"contains the special token {special!r}, which no turn's text contains",
            "leave the special token out",
        )
    return None


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenates the tensors in `parts`. If `parts` contains a single tensor, which is the usual
    case, the function returns this tensor itself without a copy."""
    if not parts:
        return torch.zeros(0, dtype=dtype)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_environment(environment: Extension | str, config: Config, tokenizer: Any) -> Environment:
    """Builds the environment with the given name or dotted path.

    Raises:
        ConfigError: the environment does not exist, its class is not an Environment, or a setting
            is invalid. Also raised if the environment and `reward.verifier` both give rewards, or
            if neither gives rewards.
    """
    kind, settings = find_environment(environment)
    judged = config.reward.verifier.name == "environment"
    if judged != kind.judges:
        name = Extension.read(environment).name
        raise ConfigError(
            f"the environment {name!r} gives the rewards itself"
            if kind.judges
            else f"the environment {name!r} gives no rewards",
            where="reward.verifier",
            fix="reward.verifier=environment" if kind.judges else "name a verifier",
        )
    return kind(config, tokenizer, **settings)


def find_environment(environment: Extension | str) -> tuple[type[Environment], dict[str, Any]]:
    """Returns the class of an environment and the environment's settings. Raises ConfigError if the
    environment does not exist, its class is not an Environment, or a setting is invalid."""
    environment = Extension.read(environment)
    kind = resolve(environment.name, ENVIRONMENTS, WHERE)
    if not (isinstance(kind, type) and issubclass(kind, Environment)):
        raise ConfigError(
            f"{environment.name!r} is not a subclass of"
            " megatron_stare.environments.environment.Environment",
            where=WHERE,
        )
    return kind, settings_of(environment, kind, WHERE)
