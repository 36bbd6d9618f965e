"""Defines the interface of rollout engines, and the records for requests and results. An engine
holds one replica of the policy and samples responses with it.

Each engine has its own worker. The engine pool (engine_pool.py) sends requests to the engines and
receives the results. The weight sync sends weights to the engines under Hugging Face names.
LocalEngine (local.py) runs the model in the worker's process. A ServedEngine is the client of a
separate server.
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
    """Request to sample a response, or the next part of a response.

    A token's sampling noise depends only on the seed, on this request's `prompt_cursor`,
    `sample_index`, `noise_step` and `branch`, and on the token's position in the response
    (sampling.py).
    """

    rid: str  # unique among the requests in flight
    input_ids: tuple[int, ...]  # prompt or a branch's context, and the tokens that followed
    prompt_cursor: int
    sample_index: int
    start: int = 0  # tokens of the response before those to sample
    # limit of this request, at most that of the sampling parameters; None: theirs
    max_new_tokens: int | None = None
    # step in which the response began; None: the sampling parameters' step
    noise_step: int | None = None
    # replica that sampled the earlier part, and may still hold its keys and values
    replica: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # added to those of the sampling parameters
    branch: int = 0  # tokens of the response before its branch (trajectory.Branch)


@dataclass
class GenerateResult:
    """Result of a request: n sampled tokens, including the stop token if the response has one.
    After the engine returns, the worker fills in `text`, and Dispatch fills in `replica`."""

    rid: str
    output_ids: Tensor  # [n] int32
    output_log_probs: Tensor  # [n] float32, nats, of the temperature-scaled distribution
    versions: VersionRuns  # versions of the weights that sampled the tokens
    finish_reason: FinishReason
    prompt_tokens: int
    text: str = ""  # decoded by the engine's worker, see model_folder.add_text
    # [m, L, K] routed experts of the first m input and output tokens; see `routing_column`
    experts: Tensor | None = None
    replica: int | None = None  # replica that answered; Dispatch fills it in

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


@dataclass(frozen=True)
class LostRequest:
    """Report of a request that an engine accepted but will never answer. The caller can send the
    request again.

    `reason`: what happened to the request, and where.
    `late`: True if the request was lost because the server did not answer within a time limit.
    `gone`: True if the request's server is lost, so that all other requests at the server are lost
        too.
    """

    rid: str
    reason: str
    late: bool = False
    gone: bool = False


class RequestLostError(UserError):
    """Raised if an engine did not answer a request."""


class EngineLostError(UserError):
    """Raised if an engine is lost. An engine is lost if its server has ended, no longer answers, or
    does not hold the weights that the run sent."""


@dataclass(frozen=True)
class ModelInfo:
    """State of an engine, and limits on the requests to the engine."""

    # None unless the state is HEALTHY or UNPROVED; in other states the weights belong to no single
    # version
    weight_version: int | None
    state: EngineState
    vocab_size: int  # from the model's config; may exceed the tokenizer's
    context_length: int  # tokens, prompt and response together
    stop_token_ids: tuple[int, ...]  # from the model's folder, without the tokenizer's
    # Limit of concurrent requests. None: takes all waiting requests at once and decodes them as one
    # batch. The place in a batch changes the last bits of a result, so the batch's composition must
    # then not depend on timing.
    capacity: int | None = None
    served: bool = False  # True: the calls of a ServedEngine are available


class WeightUpdateError(UserError):
    """Raised if an engine does not receive exactly the parameters that a weight update must
    contain. The cause is a parameter that is missing, was sent twice, is unknown, or has a wrong
    shape or wrong values. After a WeightUpdateError, the engine's state is DIRTY."""


class Engine(ABC):
    """Samples responses with the weights that the engine received. A new engine is DIRTY. Only one
    caller may use an engine at a time."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        """Accepts requests for responses. Checks all requests first. If one request is invalid, no
        request is accepted.

        A response depends only on the weights, the request and `params`. Other requests have no
        influence.

        Raises:
            UserError: a prompt or a sampling field is out of range.
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def collect(self, wait_s: float) -> Sequence[GenerateResult | LostRequest]:
        """Returns the results and the lost requests since the previous call, in any order. Every
        request is returned exactly once: either as a result or as a lost request.

        Args:
            wait_s: longest wait in seconds. If there is nothing to return until then, an empty
                sequence is returned. An in-process engine ignores wait_s.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drops all requests in flight. The engine never answers a dropped request."""

    @abstractmethod
    def begin_weight_update(self, version: int, prove: bool = True) -> None:
        """Opens a session for a weight update. The engine generates nothing until the weight update
        ends successfully. After a successful weight update, unanswered requests continue with the
        new weights.

        Args:
            prove: True: compare the values that the engine holds with the values that were sent.
                False: compare only names and counts; the engine is UNPROVED after the update.

        Raises:
            EngineStateError: a session is open already, or the engine is DEAD.
        """

    @abstractmethod
    def update_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Receives one bucket of unsharded parameters under their Hugging Face names.
        `update_weights` may be called many times per session.

        With tied embeddings, `lm_head.weight` is not sent. The tensors are copied and cast to the
        engine's compute dtype.

        Raises:
            WeightUpdateError: a name is unknown or repeated, or a shape is wrong. After this error
                the session is closed and the engine is DIRTY.
            EngineStateError: no session is open.
        """

    @abstractmethod
    def end_weight_update(self) -> dict[str, str]:
        """Checks that every parameter arrived exactly once, and publishes the weight version.

        Returns:
            Checksums (weights/sync/stream.py) of the weights that the engine now holds, by name.
            The checksum of a weight is computed in the dtype in which the weight was sent. If the
            update is not verified, each checksum is "".

        Raises:
            WeightUpdateError: parameters are missing. After this error the session is closed and
                the engine is DIRTY.
            EngineStateError: no session is open.
        """

    @abstractmethod
    def model_info(self) -> ModelInfo:
        """Returns the engine's state and limits. `model_info` can be called in every state of the
        engine."""

    def check(self) -> None:  # noqa: B027 - an in-process engine lives as long as its worker
        """Raises EngineLostError if the engine can no longer work."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model and makes the engine DEAD. Idempotent."""

    def generate(
        self, requests: Sequence[GenerateRequest], params: SamplingParams
    ) -> list[GenerateResult]:
        """Submits requests, waits for all results, and returns the results in the order of the
        requests.

        Raises:
            RequestLostError: a request was lost.
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
    """Engine whose model runs in a separate server. The engine object is a client that sends
    requests to the separate server. The server computes log-probs with its own implementation of
    the model, so the log-probs of server and trainer are compared at every step. The server's
    memory can be released while the trainer computes."""

    @abstractmethod
    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-probs, at temperature 1, of all tokens in each sequence except the first
        token.

        Raises:
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Releases the given parts of the server's memory. MEMORY in rollout/engines/state.py lists
        all parts of a server's memory. If the memory of the weights is released, the engine's state
        becomes RELEASED. While the cache is released, the engine neither samples nor computes
        log-probs.

        Raises:
            EngineStateError: a weight update is open, or one of the parts is released already.
        """

    @abstractmethod
    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        """Allocates released memory again. After the memory of the weights is allocated again, its
        contents are undefined, so the engine's state becomes DIRTY.

        Raises:
            EngineStateError: one of the parts is not released, or the cache would be allocated
                before the weights.
        """

    def sync_target(self) -> SyncTarget | None:
        """Returns the target to which the trainer's ranks can send the weights of the open update
        directly. After the ranks have sent the weights, the caller ends the session with
        `end_sent_update`. The caller must not call `update_weights` in this session. Returns None
        if the engine cannot receive weights directly from the trainer's ranks. If `sync_target`
        returns None, the caller must pass the weights to `update_weights`.

        Raises:
            EngineStateError: no session is open.
        """
        return None

    def end_sent_update(self, sent: Sequence[Any]) -> None:
        """Ends an update in which the trainer's ranks sent the weights directly to the target of
        `sync_target`. After direct sends, call `end_sent_update` instead of `end_weight_update`.
        The method `end_sent_update` makes the same checks as `end_weight_update`, but returns
        nothing.

        Args:
            sent: the report of each rank.

        Raises:
            EngineStateError: the engine returned no target, or no session is open.
        """
        raise EngineStateError(
            "weights that nobody was given a target for cannot have been sent by ranks"
        )

    def drop_weight_update(self) -> None:
        """Aborts the open update and sets the engine's state to DIRTY. Does nothing if no update is
        open. Raises EngineStateError if the trainer's ranks cannot send weights to this engine
        directly."""
        raise EngineStateError("an update that ranks did not send cannot be given up")

    @abstractmethod
    def memory_mb(self) -> float | None:
        """Returns the server's current memory use in units of 10^6 bytes, or None if the memory use
        is unknown."""


def check_params(params: SamplingParams) -> None:
    """Raises ConfigError if the value of a sampling parameter is out of range."""
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
    """Raises DataError if two requests have the same `rid`, or if the model cannot process one of
    the requests. If requests were not checked, a server would crash on an invalid token id, and
    would silently truncate a prompt that is too long."""
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
