"""The most that the trainer's ranks held in each phase of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from megatron_stare.cluster.trainer_group import TrainerGroup
from megatron_stare.records.metric import Metric
from megatron_stare.rollout.fleet.engine_pool import EnginePool

PHASES = ("rollout", "log_probs", "update", "sync", "checkpoint", "eval")
HELD = {
    "peak_mb": ("the most that a rank of the trainer held in", "below the GPU's size; level over steps"),
    "live_mb": (
        "without CUDA, tensors of the policy and what autograd kept for backward on the fullest rank, of",
        "level over steps; in log_probs and update what plan/ is held against",
    ),
    "device_mb": ("what all processes hold of the fullest GPU at the end of", "below the GPU's size"),
    "engines_mb": ("what servers on the trainer's devices hold at the end of", "small but in rollout, sync and eval"),
}
METRICS = tuple(
    Metric(f"memory/{phase}_{what}", "MB", f"10^6 bytes: {meaning} the phase {phase}", healthy)
    for phase in PHASES
    for what, (meaning, healthy) in HELD.items()
)


class PhaseMemory:
    """Gives every phase the metrics `memory/<phase>_peak_mb` and, with a GPU, `memory/<phase>_device_mb`, without CUDA
    `memory/<phase>_live_mb`, of the rank that holds most, and where engines are named `memory/<phase>_engines_mb`;
    10^6 bytes.

    Args:
        phase: opens a phase of the step, by name.
        engines: that share the trainer's devices; None: none do.
    """

    def __init__(
        self, phase: Callable[[str], AbstractContextManager[None]], ranks: TrainerGroup, engines: EnginePool | None
    ) -> None:
        self._phase, self._ranks, self._engines = phase, ranks, engines
        self._metrics: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the step. What lies between two of them counts to the later one."""
        with self._phase(name):
            yield
        found = self._ranks.memory_mb()
        if self._engines is not None and (held := self._engines.memory_mb()) is not None:
            found["engines_mb"] = held
        self._metrics |= {f"memory/{name}_{what}": mb for what, mb in found.items()}

    def take(self) -> dict[str, float]:
        """The metrics of the phases since this was asked last."""
        taken, self._metrics = self._metrics, {}
        return taken
