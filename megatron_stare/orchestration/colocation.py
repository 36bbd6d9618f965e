"""Takes the engines' memory away around training, where they share a device with the trainer."""

from __future__ import annotations

from megatron_stare.config.schema import Config
from megatron_stare.rollout.engine_pool import EnginePool


class Colocation:
    """Releases after a step's last rollout, resumes before its weight sync. Silent without `sglang.colocated`."""

    def __init__(self, config: Config, engines: EnginePool) -> None:
        self._on = config.sglang.colocated
        self._engines = engines
        self._released = False
        self.metrics: dict[str, float] = {}  # of the newest step, MB of all engines' processes

    def release(self) -> None:
        """The engines generate nothing until they are resumed and have taken a whole weight update."""
        if not self._on:
            return
        held = self._engines.memory_mb()
        self._engines.release_memory()
        self._released = True
        self._note("memory/engines_freed_mb", held, self._engines.memory_mb())

    def resume(self) -> None:
        """Gives the memory back where it was taken; what is in it is undefined until a weight update has ended."""
        if not self._released:
            return
        held = self._engines.memory_mb()
        self._engines.resume_memory()
        self._released = False
        self._note("memory/engines_taken_mb", self._engines.memory_mb(), held)

    def _note(self, name: str, larger: float | None, smaller: float | None) -> None:
        if larger is not None and smaller is not None:
            self.metrics[name] = larger - smaller
