"""Runs everything in this process: one trainer rank and the engines, called one after another. For tests and study."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.orchestration.engine_worker import EngineWorker
from megatron_stare.orchestration.groups import EngineGroup, TrainerGroup, plan_rules
from megatron_stare.orchestration.workers import Handle, Workers
from megatron_stare.rollout.build import engine_workers, requests_per_call


class InlineWorkers(Workers):
    """Objects of this process; a handle is the result."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = list(workers)

    def __len__(self) -> int:
        return len(self._workers)

    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        return getattr(self._workers[worker], method)(*args)

    def wait(self, handles: Sequence[Handle], on_done: Callable[[int], None] | None = None) -> list[Any]:
        return list(handles)  # all finished when they were started

    def share(self, value: Any) -> Handle:
        return value

    def close(self) -> None:
        while self._workers:
            self._workers.pop().close()


class InlineRunner:
    """One rank, all engines, no other process. Preflight has refused a layout of more ranks."""

    def __init__(self, config: Config) -> None:
        self._rendezvous = tempfile.TemporaryDirectory()
        trainer = Trainer(config, 0, f"file://{Path(self._rendezvous.name) / 'ranks'}")
        self.trainers = TrainerGroup(InlineWorkers([trainer]), plan_rules(config))
        self.engines = EngineGroup(
            InlineWorkers([EngineWorker(config) for _ in range(engine_workers(config))]), requests_per_call(config)
        )

    def close(self) -> None:
        self.engines.close()
        self.trainers.close()
        self._rendezvous.cleanup()
