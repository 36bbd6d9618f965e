"""Trainer and servers on the same devices: who is there when, so that both fit that could not stand
side by side.

    phase          of the trainer                          of the servers
    start          nothing, then everything                everything, then nothing
    rollout, eval  nothing                                 weights, cache
    log_probs      parameters, reference                   nothing
    update         parameters, gradients, optimizer, reference  nothing
    sync           parameters                              weights, then the cache for the canary
    checkpoint     parameters, optimizer                   weights

The optimizer's state and a cache never lie on a device together. A rank brings in what a call needs
(Trainer.onload); said here is when it has to leave, and what the servers hold.
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
        "10^6 bytes that the servers gave back after the rollout",
        "weights and cache of all servers",
    ),
    Metric(
        "memory/engines_taken_mb",
        "MB",
        "what they took again for the weight sync and the next rollout",
        "as much as they gave back",
    ),
)


LEAVING: dict[str, tuple[str, ...]] = {
    "all": PARTS,
    "optimizer": ("gradients", "optimizer"),
    "none": (),
}


def in_order(
    config: Config, trainers: Callable[[], TrainerGroup], engines: Callable[[], EnginePool]
) -> tuple[TrainerGroup, EnginePool]:
    """Both, started. Servers that share the trainer's devices are started and released before it is
    built: they size their cache by what they find free, and the trainer finds it free again."""
    if not config.sglang.colocated:
        ranks = trainers()
        return ranks, engines()
    pool = engines()
    pool.release_memory()
    return trainers(), pool


class Colocation:
    """Moves trainer and servers of `in_order`. Silent without `sglang.colocated`."""

    def __init__(self, config: Config, ranks: TrainerGroup, engines: EnginePool) -> None:
        self._on = config.sglang.colocated
        self._leaving = LEAVING[config.memory.offload or "all"]
        self._ranks, self._engines = ranks, engines
        self.metrics: dict[str, float] = {}  # of the newest step, MB of all engines' processes

    def release(self) -> None:
        """A step's last response is there: the servers leave until the next sync."""
        if not self._on:
            return
        held = self._engines.memory_mb()
        self._engines.release_memory()
        self._note("memory/engines_freed_mb", held, self._engines.memory_mb())

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Around a weight sync: the servers have room for weights before it, and for their cache
        after it. Of the trainer the parameters stay, which the canary is scored with next."""
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
        """The weights have arrived and are proven: the trainer leaves until the next log-prob
        pass."""
        if self._on:
            self._leave(self._leaving)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around the beginning of a checkpoint, which needs the optimizer's state: the servers'
        caches make room. What is written is on the host, or in a fork's view of it, when it has
        begun."""
        if not self._on or "optimizer" not in self._leaving:
            yield
            return
        self._engines.release_memory(("cache",))
        yield
        self._leave(self._leaving)
        self._engines.resume_memory(("cache",))

    def _leave(self, parts: list[str] | tuple[str, ...]) -> None:
        if parts:
            self._ranks.offload(parts)

    def _note(self, name: str, larger: float | None, smaller: float | None) -> None:
        if larger is not None and smaller is not None:
            self.metrics[name] = larger - smaller
