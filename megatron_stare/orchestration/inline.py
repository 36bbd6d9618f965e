"""Runs everything in this process: one trainer rank and the engines, called one after another. For tests and study."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.orchestration.colocation import in_order
from megatron_stare.orchestration.engine_worker import EngineWorker
from megatron_stare.orchestration.groups import TrainerGroup, plan_rules
from megatron_stare.performance import environment
from megatron_stare.process_settings import shared_environment
from megatron_stare.resolved import ResolvedRun
from megatron_stare.rollout.engine_pool import EnginePool
from megatron_stare.rollout.replicas import replica_count
from megatron_stare.rollout.retries import RequestRule
from megatron_stare.workers import Handle, Workers


class InlineWorkers(Workers):
    """Objects of this process; a handle is the result."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = list(workers)

    def __len__(self) -> int:
        return len(self._workers)

    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        return getattr(self._workers[worker], method)(*args)

    def wait(
        self, handles: Sequence[Handle], on_done: Callable[[int], None] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        return list(handles)  # all finished when they were started

    async def result(self, handle: Handle) -> Any:
        await asyncio.sleep(0)  # what was found is dealt with before the next call, which takes the thread
        return handle

    def share(self, value: Any) -> Handle:
        return value

    def close(self) -> None:
        while self._workers:
            self._workers.pop().close()


def inline_engines(config: Config) -> InlineWorkers:
    """All engines of a run, in this process."""
    return InlineWorkers([EngineWorker(config, number) for number in range(replica_count(config))])


class InlineRunner:
    """One rank, all engines, no other process. Preflight has refused a layout of more ranks."""

    def __init__(self, run: ResolvedRun) -> None:
        config = run.config
        # before the rank's first CUDA call, which reads them
        os.environ.update(shared_environment(config) | environment(config.performance))
        self._rendezvous = tempfile.TemporaryDirectory()
        self._started: list[InlineWorkers] = []
        try:
            self.trainers, self.engines = in_order(config, lambda: self._trainers(run), lambda: self._engines(config))
        except BaseException:
            self.close()
            raise

    def notes(self) -> list[str]:
        return []

    def _trainers(self, run: ResolvedRun) -> TrainerGroup:
        workers = InlineWorkers([Trainer(run, 0, f"file://{Path(self._rendezvous.name) / 'ranks'}")])
        self._started.append(workers)
        return TrainerGroup(workers, plan_rules(run))

    def engines_beside(self, config: Config) -> EnginePool:
        """See Runner."""
        return self._engines(config)

    def _engines(self, config: Config) -> EnginePool:
        workers = inline_engines(config)
        self._started.append(workers)  # servers that were started
        return EnginePool(workers, config.rollout.prove_every, RequestRule.of(config))

    def close(self) -> None:
        while self._started:
            self._started.pop().close()
        self._rendezvous.cleanup()


class InlineEngines:
    """As InlineRunner, of the engines alone."""

    def __init__(self, config: Config) -> None:
        os.environ.update(shared_environment(config))
        self._workers = inline_engines(config)
        try:
            self.engines = EnginePool(self._workers, config.rollout.prove_every, RequestRule.of(config))
        except BaseException:
            self.close()
            raise

    def notes(self) -> list[str]:
        return []

    def share(self, value: Any) -> Handle:
        return self._workers.share(value)

    def close(self) -> None:
        self._workers.close()
