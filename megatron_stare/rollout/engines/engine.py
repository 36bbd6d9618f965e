"""The rollout engine's interface: one replica of the policy that samples responses, and the records
it takes and returns.

An engine lives in a worker of its own. Requests come from the pool (engine_pool.py), results go
back to it; weights come from the weight sync, under Hugging Face names. LocalEngine (local.py)
computes in its worker's process, others speak for a server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_stare.errors import ConfigError, DataError, UserError
from megatron_stare.records.batch import FinishReason, SamplingParams
from megatron_stare.records.trajectory import VersionRuns
from megatron_stare.rollout.engines.state import MEMORY, EngineState, EngineStateError
from megatron_stare.weights.sync.target import SyncTarget


@dataclass(frozen=True)
class GenerateRequest:
    """Tokens wanted: a response, or the next part of one.

    `prompt_cursor`, `sample_index`, `noise_step` and the position in the response key its sampling
    noise (sampling.py).
    """

    rid: str  # unique among the requests under way
    input_ids: tuple[int, ...]  # all that stands before what is wanted
    prompt_cursor: int
    sample_index: int
    start: int = 0  # tokens of the response that are among `input_ids`
    # limit of this request, at most the sampling parameters'; None: theirs
    max_new_tokens: int | None = None
    # step that the response was begun in; None: the sampling parameters' step
    noise_step: int | None = None
    # replica that had the context before, and may still hold its keys and values
    replica: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # that end it beside those of the sampling parameters


@dataclass
class GenerateResult:
    """The tokens that were sampled, n of them; the stop token, where there is one, is among them.
    Text and replica are filled in on its way."""

    rid: str
    output_ids: Tensor  # [n] int32
    output_log_probs: Tensor  # [n] float32, nats, of the temperature-scaled distribution
    versions: VersionRuns  # of the weights that sampled the tokens
    finish_reason: FinishReason
    prompt_tokens: int
    text: str = ""  # of the tokens; the engine's worker decodes it, see model_folder.add_text
    # [m, L, K] of the first m tokens, input and output; see `routing_column`
    experts: Tensor | None = None
    replica: int | None = None  # that answered; who hands the requests out fills it in

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


@dataclass(frozen=True)
class LostRequest:
    """A request that was taken and will never be answered; whoever made it may make it again.

    reason: what became of it, and where.
    late: its limit passed.
    gone: whoever was to answer it is lost, with all else that it had.
    """

    rid: str
    reason: str
    late: bool = False
    gone: bool = False


class RequestLostError(UserError):
    """A response did not come."""


class EngineLostError(UserError):
    """An engine is lost: its server has ended, does not answer any more, or holds other weights
    than it was given."""


@dataclass(frozen=True)
class ModelInfo:
    """State of an engine, and how it wants its requests."""

    # None unless the state is HEALTHY or UNPROVED: in other states the weights are of no single
    # version
    weight_version: int | None
    state: EngineState
    vocab_size: int  # of the model's config, which may exceed the tokenizer's
    context_length: int  # tokens, prompt and response together
    stop_token_ids: tuple[int, ...]  # of the model's folder; the tokenizer's are not known here
    # Requests that it is given at a time; None: all that wait, at once. An engine with None decodes
    # together what it is given. The place in a batch moves the last bits, so what it is given must
    # not depend on the clock.
    capacity: int | None = None
    served: bool = False  # the calls of a ServedEngine are answered


class WeightUpdateError(UserError):
    """A weight update was not the complete set of the model's parameters; the engine is DIRTY."""


class Engine(ABC):
    """Samples responses with the weights it was sent. Starts DIRTY; one caller at a time."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        """Takes requests, which are checked first: none is taken if one is wrong.

        A response depends on the weights, the request and `params`, not on what else is under way.

        Raises:
            UserError: a prompt or a sampling field is out of range.
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def collect(self, wait_s: float) -> Sequence[GenerateResult | LostRequest]:
        """Takes what has been finished or lost since the last call, in any order; each request is
        answered or lost once.

        Args:
            wait_s: after which it returns though nothing is finished; an engine in process does not
                look at it.
        """

    @abstractmethod
    def abort(self) -> None:
        """Forgets all requests under way; none of them is answered any more."""

    @abstractmethod
    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        """Opens a session. From here until it ends well, the engine generates nothing; what was
        submitted before and is not answered yet goes on then, with the new weights.

        Args:
            prove: compare the values that will be held with those that come. Else names and counts
                alone are compared, and the engine is UNPROVED afterwards.

        Raises:
            EngineStateError: a session is open already, or the engine is DEAD.
        """

    @abstractmethod
    def update_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """One bucket of parameters under their Hugging Face names, whole (not sharded); may be
        called many times.

        `lm_head.weight` is not part of a model with tied embeddings. The tensors are copied, and
        cast to the dtype the engine computes in.

        Raises:
            WeightUpdateError: an unknown or repeated name, or a wrong shape; the session is over,
                the engine DIRTY.
            EngineStateError: no session is open.
        """

    @abstractmethod
    def end_weight_update(self) -> dict[str, str]:
        """Checks that every parameter came exactly once and publishes the version.

        Returns:
            Checksum (weights/sync/stream.py) by name, of the weights now held, in the dtype they
            were sent in; "" where nothing is proven.

        Raises:
            WeightUpdateError: parameters are missing; the session is over, the engine DIRTY.
            EngineStateError: no session is open.
        """

    @abstractmethod
    def model_info(self) -> ModelInfo:
        """Says what the engine holds; answers in every state."""

    def check(self) -> None:  # noqa: B027 - an engine in process is there as long as its worker
        """Raises EngineLostError where the engine can do nothing more."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model; the engine is DEAD. Closing twice is allowed."""

    def generate(
        self, requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> list[GenerateResult]:
        """One result a request, in the order of the requests; waits for the last of them.

        Raises:
            RequestLostError: one was lost.
        """
        self.submit(requests, params)
        found: dict[str, GenerateResult] = {}
        while len(found) < len(requests):
            for result in self.collect(wait_s=1.0):
                if isinstance(result, LostRequest):
                    self.abort()
                    raise RequestLostError(result.reason, where=f"request {result.rid}")
                found[result.rid] = result
        return [found[request.rid] for request in requests]


class ServedEngine(Engine):
    """An engine in front of a server: it computes apart from the trainer, so its arithmetic is
    compared with the trainer's step by step, and it can be put aside while the trainer computes."""

    @abstractmethod
    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs, at temperature 1, of all tokens but the first of every sequence.

        Raises:
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Gives back memory of rollout/engines/state.py's MEMORY, as far as it can: without its
        weights it is RELEASED, without its cache it computes nothing.

        Raises:
            EngineStateError: a weight update is open, or one of the parts is released already.
        """

    @abstractmethod
    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Takes memory again. What is in that of weights is undefined, so the engine is DIRTY with
        them.

        Raises:
            EngineStateError: one of the parts is not released, or the cache would come before the
                weights.
        """

    def sync_target(self) -> SyncTarget | None:
        """Target to which the trainer's ranks send the weights of the open update themselves; then
        none comes by `update_weights`, and `end_sent_update` ends it. None: they do not.

        Raises:
            EngineStateError: no session is open.
        """
        return None

    def end_sent_update(self, sent: Sequence[Any]) -> None:
        """Ends an update whose weights ranks sent to the target; see `end_weight_update`.

        Args:
            sent: what each of them tells.

        Raises:
            EngineStateError: the engine gave no target, or no session is open.
        """
        raise EngineStateError(
            "weights that nobody was given a target for cannot have been sent by ranks"
        )

    def drop_weight_update(self) -> None:
        """Gives the open update up, whatever has come of it; the engine is DIRTY. Nothing where
        none is open."""
        raise EngineStateError("an update that ranks did not send cannot be given up")

    @abstractmethod
    def memory_mb(self) -> float | None:
        """Memory of the server now, 10^6 bytes; None where that is not known."""


def check_params(params: SamplingParams) -> None:
    """Raises ConfigError where a sampling field is out of range."""
    if not params.temperature > 0:
        raise ConfigError(
            f"a temperature of {params.temperature} cannot divide the logits",
            where="rollout.temperature",
            fix="use a value above 0; for the likeliest token, decode greedily",
        )
    if not 0 < params.top_p <= 1:
        raise ConfigError(
            f"no tokens together have a probability of {params.top_p}",
            where="top_p",
            fix="above 0, to 1",
        )
    if params.max_new_tokens < 1:
        raise ConfigError(
            f"no response has {params.max_new_tokens} tokens", where="rollout.max_new_tokens"
        )


def check_requests(
    requests: Sequence[GenerateRequest], params: SamplingParams, info: ModelInfo
) -> None:
    """Raises DataError naming the first request that the model cannot take: a wrong id kills a real
    server, and a prompt that is too long is cut silently."""
    if len({r.rid for r in requests}) != len(requests):
        raise DataError(
            "two requests of one call have the same rid",
            fix="give every sample of a prompt its own index",
        )
    for request in requests:
        where = f"request {request.rid} (prompt {request.prompt_cursor})"
        if not request.input_ids:
            raise DataError(
                "the prompt has no tokens", where=where, fix="drop empty prompts from the data"
            )
        low, high = min(request.input_ids), max(request.input_ids)
        if low < 0 or high >= info.vocab_size:
            raise DataError(
                f"token id {low if low < 0 else high} is outside the model's vocabulary of"
                f" {info.vocab_size}",
                where=where,
                fix="use the tokenizer that belongs to the model",
            )
        new = min(request.max_new_tokens or params.max_new_tokens, params.max_new_tokens)
        total = len(request.input_ids) + new
        if total > info.context_length:
            raise DataError(
                f"{len(request.input_ids)} prompt tokens and up to {new} new ones make {total}; "
                f"the model's context holds {info.context_length}",
                where=where,
                fix="lower rollout.max_new_tokens or rollout.max_prompt_tokens",
            )
