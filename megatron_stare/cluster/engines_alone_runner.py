"""Engines without a trainer, wherever they live: those of `megatron-stare eval`."""

from __future__ import annotations

from typing import Any, Protocol

from megatron_stare.config.schema import Config
from megatron_stare.process.workers import Handle
from megatron_stare.rollout.fleet.engine_pool import EnginePool


class EnginesAlone(Protocol):
    """See InlineEngines and RayEngines."""

    engines: EnginePool

    def notes(self) -> list[str]:
        """Where they were placed, a line each; none where there was nothing to choose."""
        ...

    def share(self, value: Any) -> Handle:
        """Puts a value where every engine can take it from, once."""
        ...

    def close(self) -> None: ...


def make_engines(config: Config) -> EnginesAlone:
    """Started where runtime.runner says; Ray is imported only there.

    Raises:
        UserError: one does not come up, or cannot be placed.
    """
    if config.runtime.runner == "inline":
        from megatron_stare.cluster.inline import InlineEngines

        return InlineEngines(config)
    from megatron_stare.cluster.ray_runner import RayEngines

    return RayEngines(config)
