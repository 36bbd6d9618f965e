"""A rollout engine as a worker: takes weights as the trainer streams them, in flat buckets of known layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_stare.batch import SamplingParams
from megatron_stare.config.schema import Config
from megatron_stare.errors import UserError
from megatron_stare.rollout.build import engine_of
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult, ModelInfo, ServedEngine
from megatron_stare.weights.stream_plan import BucketLayout


class EngineWorker:
    """Holds one engine. Its calls are those of `rollout.engine.ServedEngine`."""

    def __init__(self, config: Config) -> None:
        self._engine = engine_of(config)
        self._layouts: Sequence[BucketLayout] = ()

    def expect_buckets(self, layouts: Sequence[BucketLayout]) -> None:
        """What the buckets of every weight update from now on hold."""
        self._layouts = layouts

    def is_served(self) -> bool:
        """Whether the calls of a ServedEngine will be answered."""
        return isinstance(self._engine, ServedEngine)

    @property
    def _served(self) -> ServedEngine:
        if not isinstance(self._engine, ServedEngine):
            raise UserError(
                f"{type(self._engine).__name__} has no servers to score with or to put aside", where="rollout.engine"
            )
        return self._engine

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[GenerateResult]:
        return self._engine.generate(requests, params)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return self._served.score(sequences)

    def begin_weight_update(self, version: int) -> None:
        self._engine.begin_weight_update(version)

    def update_weights(self, number: int, flat: Tensor) -> None:
        """Takes the bucket of this number."""
        self._engine.update_weights(self._layouts[number].tensors(flat))

    def end_weight_update(self) -> dict[str, str]:
        return self._engine.end_weight_update()

    def release_memory(self) -> None:
        self._served.release_memory()

    def resume_memory(self) -> None:
        self._served.resume_memory()

    def memory_mb(self) -> float | None:
        return self._served.memory_mb()

    def model_info(self) -> ModelInfo:
        return self._engine.model_info()

    def close(self) -> None:
        self._engine.close()
