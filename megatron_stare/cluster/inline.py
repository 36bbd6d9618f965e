"""Runs one trainer rank and the engines in this process, one call after another. This runner is for
tests and study."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_stare.cluster.colocation import in_order
from megatron_stare.cluster.trainer_group import TrainerGroup, plan_rules
from megatron_stare.config.performance import environment
from megatron_stare.config.process_settings import shared_environment
from megatron_stare.config.resolved import ResolvedRun
from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.layout import leave, require_alone
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.process.interruption import poll, temporary_folder
from megatron_stare.process.network import LOOPBACK
from megatron_stare.process.signs_of_life import counted, unsaid
from megatron_stare.process.workers import Handle, WorkerLostError, Workers
from megatron_stare.rollout.engines.engine_worker import EngineWorker
from megatron_stare.rollout.engines.replicas import (
    HERE,
    Site,
    make_part,
    replica_count,
    replica_nodes,
)
from megatron_stare.rollout.fleet.engine_pool import EnginePool
from megatron_stare.rollout.fleet.health import NO_RESTARTS, RestartRule
from megatron_stare.rollout.fleet.retries import RequestRule


class InlineWorkers(Workers):
    """Workers that are objects in this process. A call runs immediately, and the call's handle is
    the result itself.

    Args:
        make: a function that creates a replacement for the worker with a given number. If `make` is
            None, lost workers cannot be replaced.
    """

    def __init__(self, workers: Sequence[Any], make: Callable[[int], Any] | None = None) -> None:
        self._workers, self._make = list(workers), make
        self._closing = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._workers)

    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        poll()
        return getattr(self._workers[worker], method)(*args)

    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        return list(handles)  # calls finish when started

    async def result(self, handle: Handle) -> Any:
        # yield, so that the event loop handles this result before the next call blocks the thread
        await asyncio.sleep(0)
        return handle

    def share(self, value: Any) -> Handle:
        return value

    def replace(self, worker: int) -> None:
        """See Workers."""
        if self._make is None:
            return super().replace(worker)
        with contextlib.suppress(Exception):  # the old worker is lost, so its errors do not matter
            self._workers[worker].close()
        new = self._make(worker)
        with self._closing:
            if not self._closed:
                self._workers[worker] = new
                return None
        new.close()
        raise WorkerLostError(f"worker {worker} is not restarted, because the run is ending")

    def close(self) -> None:
        with self._closing:
            self._closed = True
            workers, self._workers = self._workers, []
        while workers:
            workers.pop().close()


def inline_engines(config: Config, sites: Sequence[Site] = ()) -> InlineWorkers:
    """Makes all engines of a run in this process.

    Args:
        sites: the nodes of each replica. If `sites` is empty, every replica is on this machine
            alone.
    """

    def make(number: int) -> EngineWorker:
        return EngineWorker(config, number, sites[number] if sites else HERE)

    return InlineWorkers([make(number) for number in range(replica_count(config))], make)


def _engines(config: Config) -> str:
    return f"{counted(replica_count(config), 'rollout engine')} ({config.rollout.engine.name})"


class InlineRunner:
    """Runs one rank and all engines in this process. For this runner, preflight rejects every
    layout with more than one rank.

    Args:
        tell: a function that is called with a line of text before each start that takes seconds.

    Raises:
        UserError: this process belongs to a process group of torch.distributed already.
    """

    def __init__(self, run: ResolvedRun, tell: Callable[[str], None] = unsaid) -> None:
        config, self._tell = run.config, tell
        require_alone()
        # before the rank's first CUDA call, which reads them
        os.environ.update(shared_environment(config) | environment(config))
        self._rendezvous = contextlib.ExitStack()
        self._meeting = self._rendezvous.enter_context(temporary_folder()) / "ranks"
        self._started: list[InlineWorkers | EnginePool] = []
        try:
            self.trainers, self.engines = in_order(
                config, lambda: self._trainers(run), lambda: self._engines(config)
            )
        except BaseException:
            self.close()
            raise

    def notes(self) -> list[str]:
        return []

    def pids_here(self) -> list[int]:
        """See Runner. Returns an empty list, because no rank or engine has a process of its own."""
        return []

    def _trainers(self, run: ResolvedRun) -> TrainerGroup:
        self._tell(f"building the trainer of {run.config.model.path} ...")
        try:
            trainer = Trainer(run, 0, f"file://{self._meeting}")
        except BaseException:
            leave()  # else this process could not build a trainer again
            raise
        workers = InlineWorkers([trainer])
        self._started.append(workers)
        return TrainerGroup(workers, plan_rules(run))

    def engines_beside(self, config: Config) -> EnginePool:
        """See Runner."""
        return self._engines(config)

    def _engines(self, config: Config) -> EnginePool:
        if replica_count(config):
            self._tell(f"starting {_engines(config)} ...")
        workers = inline_engines(
            config, [self._site(config, number) for number in range(replica_count(config))]
        )
        self._started.append(workers)  # so that `close` ends their servers
        rules = RequestRule.of(config), RestartRule.of(config)
        self._started.append(pool := EnginePool(workers, config.rollout.prove_every, *rules))
        return pool

    def _site(self, config: Config, number: int) -> Site:
        nodes = range(1, replica_nodes(config))
        if not nodes:
            return HERE
        parts = InlineWorkers([make_part(config, number, node) for node in nodes])
        self._started.append(parts)
        return Site(parts, LOOPBACK, (LOOPBACK,) * len(nodes))

    def lost(self, error: Exception) -> WorkerLostError | None:
        """See Runner. Returns None, because no rank or engine has a process of its own that could
        be lost."""
        return None

    def close(self) -> None:
        while self._started:
            self._started.pop().close()
        self._rendezvous.close()


class InlineEngines:
    """Engines in the driver's process, without a trainer; see InlineRunner."""

    def __init__(self, config: Config, tell: Callable[[str], None] = unsaid) -> None:
        os.environ.update(shared_environment(config))
        tell(f"starting {_engines(config)} ...")
        self._workers = inline_engines(config)
        try:
            self.engines = EnginePool(
                self._workers, config.rollout.prove_every, RequestRule.of(config), NO_RESTARTS
            )
        except BaseException:
            self.close()
            raise

    def notes(self) -> list[str]:
        return []

    def share(self, value: Any) -> Handle:
        return self._workers.share(value)

    def close(self) -> None:
        self._workers.close()
