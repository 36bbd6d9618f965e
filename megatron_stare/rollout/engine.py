"""What a rollout engine is: the records it takes and returns, and the calls it answers, shaped after SGLang's protocol.

Requests come from collect.py, results go back to it. Weights come from the weight sync, under Hugging Face names.
LocalEngine (local.py) answers in process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_stare.batch import FinishReason, SamplingParams
from megatron_stare.errors import UserError
from megatron_stare.rollout.state import EngineState


@dataclass(frozen=True)
class GenerateRequest:
    """One response wanted. `prompt_cursor` and `sample_index` key its sampling noise (sampling.py)."""

    rid: str  # unique among the requests of a call
    input_ids: tuple[int, ...]
    prompt_cursor: int
    sample_index: int


@dataclass(frozen=True)
class GenerateResult:
    """One response. The three lists are equally long; the stop token, where there is one, is in all of them."""

    rid: str
    output_ids: list[int]
    output_log_probs: list[float]  # nats, of the temperature-scaled distribution
    weight_versions: list[int]  # of the weights that sampled each token
    finish_reason: FinishReason
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


@dataclass(frozen=True)
class ModelInfo:
    """What an engine holds."""

    weight_version: int | None  # None unless the state is HEALTHY: no other weights are those of a version
    state: EngineState
    vocab_size: int  # of the model's config, which may exceed the tokenizer's
    context_length: int  # tokens, prompt and response together
    stop_token_ids: tuple[int, ...]  # of the model's folder; the tokenizer's are not known here


class WeightUpdateError(UserError):
    """A weight update was not the complete set of the model's parameters; the engine is DIRTY."""


class Engine(ABC):
    """Samples responses with the weights it was sent. Starts DIRTY; one caller at a time."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[GenerateResult]:
        """One result a request, in the order of the requests.

        A response depends on the weights, the request and `params`, not on what else is in the call.

        Raises:
            UserError: a prompt or a sampling field is out of range; checked before anything is sampled.
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def begin_weight_update(self, version: int) -> None:
        """Opens a session. From here until it ends well, the engine generates nothing.

        Raises:
            EngineStateError: a session is open already, or the engine is DEAD.
        """

    @abstractmethod
    def update_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        """One bucket of parameters under their Hugging Face names, whole (not sharded); may be called many times.

        `lm_head.weight` is not part of a model with tied embeddings. The tensors are copied, and cast to the dtype the
        engine computes in.

        Raises:
            WeightUpdateError: an unknown or repeated name, or a wrong shape; the session is over, the engine DIRTY.
            EngineStateError: no session is open.
        """

    @abstractmethod
    def end_weight_update(self) -> dict[str, str]:
        """Checks that every parameter came exactly once and publishes the version.

        Returns:
            Checksum (weights/checksum.py) by name, of the weights now held, in the dtype they were sent in.

        Raises:
            WeightUpdateError: parameters are missing; the session is over, the engine DIRTY.
            EngineStateError: no session is open.
        """

    @abstractmethod
    def model_info(self) -> ModelInfo:
        """What the engine holds; answers in every state."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model; the engine is DEAD. Closing twice is allowed."""


class ServedEngine(Engine):
    """An engine in front of servers: they compute apart from the trainer, so their arithmetic is compared with its own
    step by step, and they can be put aside while it trains."""

    @abstractmethod
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        """Every server's log-probs, at temperature 1, of all tokens but the first of every sequence.

        Returns:
            By server, then by sequence.

        Raises:
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def release_memory(self) -> None:
        """Gives back what memory it can: RELEASED until `resume_memory`.

        Raises:
            EngineStateError: the engine is not HEALTHY.
        """

    @abstractmethod
    def resume_memory(self) -> None:
        """Takes the memory again. What is in it is undefined, so the engine is DIRTY.

        Raises:
            EngineStateError: the engine is not RELEASED.
        """

    @abstractmethod
    def memory_mb(self) -> float | None:
        """What the servers hold now, 10^6 bytes; None where that is not known."""
