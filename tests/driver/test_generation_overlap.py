"""The trainer gathers the next bucket of weights while a server still takes the one at hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.sglang_fake import FakeServer
from support.threads import Threads
from torch import Tensor

from megatron_stare.cluster.trainer_group import TrainerWeights
from megatron_stare.config.schema import Config
from megatron_stare.rollout.engines import engine_worker
from megatron_stare.rollout.engines.sglang.server_engine import SGLangEngine
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.weights.sync.stream import tensor_checksum
from megatron_stare.weights.sync.stream_plan import BucketLayout, Slot

MODEL = str(Path(__file__).parents[2] / "assets" / "tiny-adder")
NAMES = (
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.input_layernorm.weight",
)
LAYOUTS = tuple(BucketLayout(torch.float32, (Slot(name, (3,), 0),)) for name in NAMES)
LOST_S = 20.0  # until a call that never comes counts as lost


class Trainer:
    """A sender of buckets that says when it has begun to gather each of them."""

    def __init__(self) -> None:
        self.begun = [threading.Event() for _ in NAMES]
        self._numbers: Iterator[int] = iter(())

    def begin_weight_stream(self, checksums: bool) -> None:
        self._numbers = iter(range(len(NAMES)))

    def next_bucket(self) -> Tensor:
        number = next(self._numbers)
        self.begun[number].set()
        return torch.full((3,), float(number))

    def end_weight_stream(self) -> dict[str, str]:
        return {name: tensor_checksum(torch.full((3,), float(i))) for i, name in enumerate(NAMES)}

    def close(self) -> None:
        """Nothing is held."""


class UpAlready:
    """Stands for what brings an engine up."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine

    def engine(self) -> SGLangEngine:
        return self._engine

    def close(self) -> None: ...


class SlowServer(FakeServer):
    """Takes a bucket only once the next one is being gathered."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__("slow")
        self._begun, self._taken = trainer.begun, 0

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        self._taken += 1
        if self._taken < len(NAMES) and not self._begun[self._taken].wait(LOST_S):
            return {
                "success": False,
                "message": f"bucket {self._taken} is not gathered while I take the one before",
            }
        return super()._load(body)


def test_the_next_bucket_is_gathered_while_a_server_takes_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer()
    client = SlowServer(trainer).client()
    engine = SGLangEngine(
        client, TensorSync([client]), MODEL, "float32", 2, asyncio.new_event_loop()
    )
    monkeypatch.setattr(
        engine_worker, "make_replica", lambda config, number, beside: UpAlready(engine)
    )
    trainers = Threads([trainer])
    engines = Threads(
        [engine_worker.EngineWorker(Config.model_validate({"model": {"path": MODEL}}), 0)]
    )
    try:
        EnginePool(engines).update_weights(7, TrainerWeights(trainers, LAYOUTS))
        assert engine.model_info().weight_version == 7
    finally:
        engines.close()
        trainers.close()
