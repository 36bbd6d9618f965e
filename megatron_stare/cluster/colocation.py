"""Moves the trainer and the servers on and off the devices that they share. The shared devices may
be too small to hold the trainer and the servers at the same time.

    phase          trainer memory                          server memory
    start          nothing, then everything                everything, then nothing
    rollout, eval  nothing                                 weights, cache
    log_probs      parameters, reference                   nothing
    update         parameters, gradients, optimizer, reference  nothing
    sync           parameters                              weights, then the cache for the canary
    checkpoint     parameters, optimizer                   weights

Optimizer state and KV cache are never on a device at the same time. Before each call, a rank loads
the parts of the trainer that this call needs (Trainer.onload). This module decides when the trainer
offloads, what the servers hold in memory, and when a lost server may restart. A lost server
restarts only in the phases rollout and eval, in which the trainer holds no device memory. At its
start, a server chooses the size of its cache according to the free device memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.config.schema import Config
from megatron_stare.megatron.optimizer.offload import PARTS
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.fleet.engine_pool import EnginePool

METRICS = (
    Metric(
        "memory/engines_freed_mb",
        "MB",
        "10^6 bytes that the servers gave back after the rollout; of the first three steps and of"
        " every tenth",
        "weights and cache of all servers",
    ),
    Metric(
        "memory/engines_taken_mb",
        "MB",
        "10^6 bytes that the servers took again for the weight sync and the next rollout",
        "as memory/engines_freed_mb",
    ),
)


# steps that measure the servers' memory, the first ones and then every so many
MEASURED_FIRST, MEASURED_EVERY = 3, 10
LEAVING: dict[str, tuple[str, ...]] = {
    "all": PARTS,
    "optimizer": ("gradients", "optimizer"),
    "none": (),
}


def in_order(
    config: Config, trainers: Callable[[], TrainerGroup], engines: Callable[[], EnginePool]
) -> tuple[TrainerGroup, EnginePool]:
    """Starts trainer and engines.

    Colocated servers start before the trainer is built, because a server chooses the size of its
    cache when the server starts, according to the free device memory. The servers release their
    memory after their own start, to make room for the trainer.
    """
    if not config.sglang.colocated:
        ranks = trainers()
        return ranks, engines()
    pool = engines()
    pool.release_memory()
    return trainers(), pool


class Colocation:
    """Moves the trainer and the servers on and off the shared devices. Requires that `in_order` has
    started the trainer and the servers. Does nothing without `sglang.colocated`."""

    def __init__(self, config: Config, ranks: TrainerGroup, engines: EnginePool) -> None:
        self._on = config.sglang.colocated
        self._leaving = LEAVING[config.memory.offload or "all"]
        self._ranks, self._engines = ranks, engines
        self._released = 0  # times
        # of the newest step, MB of all engines' processes; empty in steps that do not measure it
        self.metrics: dict[str, float] = {}

    def release(self) -> None:
        """Releases the servers' memory after the last response of a step. The next weight sync
        restores the servers' memory."""
        if not self._on:
            return
        self._engines.hold_restarts()
        self.metrics.clear()
        self._released += 1
        measures = self._released <= MEASURED_FIRST or self._released % MEASURED_EVERY == 0
        self._engines.measures_memory = measures
        held = self._engines.memory_mb()
        self._engines.release_memory()
        self._note("memory/engines_freed_mb", held, self._engines.memory_mb())

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Context manager around a weight sync. Restores the memory of the servers' weights before
        the sync, and the memory of the servers' caches after the sync. Offloads the parts of the
        trainer that `memory.offload` selects, but not the parameters. The trainer needs the
        parameters after the sync, to compute the canary's log-probs."""
        if not self._on:
            yield
            return
        self._leave([part for part in self._leaving if part != "parameters"])
        held = self._engines.memory_mb()
        self._engines.resume_memory(("weights",))
        yield
        self._engines.resume_memory(("cache",))
        self._note("memory/engines_taken_mb", self._engines.memory_mb(), held)

    def synced(self) -> None:
        """Offloads the trainer after a verified weight sync. The next log-prob pass loads the
        trainer again. Allows restarts of lost servers. A later call of `release` forbids restarts
        of lost servers."""
        if self._on:
            self._leave(self._leaving)
            self._engines.allow_restarts()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager for the time in which the ranks copy a checkpoint's data to host memory.
        Releases the servers' caches to make room for the optimizer state. Before the `with` block
        ends, the ranks must have copied all of the checkpoint's data to host memory."""
        if not self._on or "optimizer" not in self._leaving:
            yield
            return
        self._engines.hold_restarts()
        self._engines.release_memory(("cache",))
        yield
        self._leave(self._leaving)
        self._engines.resume_memory(("cache",))
        self._engines.allow_restarts()

    def _leave(self, parts: list[str] | tuple[str, ...]) -> None:
        if parts:
            self._ranks.offload(parts)

    def _note(self, name: str, larger: float | None, smaller: float | None) -> None:
        if larger is not None and smaller is not None:
            self.metrics[name] = larger - smaller
