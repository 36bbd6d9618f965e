"""Runs a rollout engine in a worker. The worker accepts requests, returns results, and receives the
weights that the trainer streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.records.batch import SamplingParams
from megatron_stare.rollout.engines.engine import (
    Engine,
    GenerateRequest,
    GenerateResult,
    LostRequest,
    ModelInfo,
    ServedEngine,
)
from megatron_stare.rollout.engines.model_folder import add_text, load_tokenizer
from megatron_stare.rollout.engines.replicas import HERE, Site, make_replica
from megatron_stare.rollout.engines.state import MEMORY
from megatron_stare.weights.sync.stream_plan import BucketLayout
from megatron_stare.weights.sync.target import SyncTarget


class EngineWorker:
    """Holds the engine of the run's replica with index `number`. The constructor starts the engine,
    but does not wait until the engine is ready. All replicas of a run therefore start in parallel.
    `bring_up` waits until the engine is ready.

    Args:
        site: nodes of the replica.
    """

    def __init__(self, config: Config, number: int, site: Site = HERE) -> None:
        self._replica = make_replica(config, number, site)
        self._model_path = config.model.path
        self._brought_up: Engine | None = None
        self._layouts: Sequence[BucketLayout] = ()

    def bring_up(self) -> ModelInfo:
        """Waits until the engine can receive weights. Raises UserError if the engine does not
        start."""
        self._brought_up = self._replica.engine()
        return self._brought_up.model_info()

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._model_path)

    @property
    def _engine(self) -> Engine:
        if self._brought_up is None:
            raise RuntimeError("the engine has not been brought up")
        return self._brought_up

    @property
    def _served(self) -> ServedEngine:
        if not isinstance(self._engine, ServedEngine):
            raise UserError(
                f"{type(self._engine).__name__} has no server to ask for log-probs or to put aside",
                where="rollout.engine",
            )
        return self._engine

    def advance(
        self, requests: Sequence[GenerateRequest], params: SamplingParams, wait_s: float
    ) -> Sequence[GenerateResult | LostRequest]:
        """Submits `requests`, collects results, and decodes the tokens of each result to text.
        Returns the results and the lost requests; see Engine.submit and Engine.collect."""
        if requests:
            self._engine.submit(requests, params)
        results = self._engine.collect(wait_s)
        for result in results:
            if not isinstance(result, LostRequest):
                add_text(result, self._tokenizer)
        return results

    def abort(self) -> None:
        self._engine.abort()

    def prompt_log_probs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._served.prompt_log_probs(sequences)

    def expect_buckets(self, layouts: Sequence[BucketLayout]) -> None:
        """Sets the bucket layouts for all later weight updates."""
        self._layouts = layouts

    def begin_weight_update(self, version: int, prove: bool = True) -> SyncTarget | None:
        """Begins a weight update. Returns the target to which the trainer's ranks send the weights.
        Returns None if the weights must be passed to `update_weights`."""
        self._engine.begin_weight_update(version, prove)
        return self._engine.sync_target() if isinstance(self._engine, ServedEngine) else None

    def update_weights(self, number: int, flat: Tensor) -> None:
        """Receives the bucket with index `number` of the open weight update."""
        self._engine.update_weights(self._layouts[number].tensors(flat))

    def end_weight_update(self) -> dict[str, str]:
        return self._engine.end_weight_update()

    def end_sent_update(self, sent: Sequence[Any]) -> None:
        self._served.end_sent_update(sent)

    def drop_weight_update(self) -> None:
        self._served.drop_weight_update()

    def check(self) -> None:
        self._engine.check()

    def release_memory(self, parts: Collection[str] = MEMORY) -> None:
        self._served.release_memory(parts)

    def resume_memory(self, parts: Collection[str] = MEMORY) -> None:
        self._served.resume_memory(parts)

    def memory_mb(self) -> float | None:
        return self._served.memory_mb()

    def model_info(self) -> ModelInfo:
        return self._engine.model_info()

    def close(self) -> None:
        if self._brought_up is not None:
            self._brought_up.close()
        self._replica.close()
