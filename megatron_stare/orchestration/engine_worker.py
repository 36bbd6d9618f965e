"""A rollout engine as a worker: takes weights as the trainer exports them, a mapping by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron_stare.batch import SamplingParams
from megatron_stare.config.schema import Config
from megatron_stare.rollout.build import engine_of
from megatron_stare.rollout.engine import GenerateRequest, GenerateResult, ModelInfo


class EngineWorker:
    """Holds one engine. Its calls are those of `rollout.engine.Engine`."""

    def __init__(self, config: Config) -> None:
        self._engine = engine_of(config)

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[GenerateResult]:
        return self._engine.generate(requests, params)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return self._engine.score(sequences)

    def begin_weight_update(self, version: int) -> None:
        self._engine.begin_weight_update(version)

    def update_weights(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:  # ranks that do not export send an empty mapping
            self._engine.update_weights(list(tensors.items()))

    def end_weight_update(self) -> dict[str, str]:
        return self._engine.end_weight_update()

    def model_info(self) -> ModelInfo:
        return self._engine.model_info()

    def close(self) -> None:
        self._engine.close()
