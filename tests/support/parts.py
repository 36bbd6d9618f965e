"""An engine on two nodes, of which nothing is there but its workers, in the actors of a Ray
cluster."""

from __future__ import annotations

import os
from typing import Any

import ray

from megatron_stare.process.workers import Workers
from megatron_stare.rollout.engines.replicas import Site


class Part:
    """Part of an engine, on another node than its first."""

    def __init__(self, node: int) -> None:
        self.node = node

    def ended(self) -> str:
        return f"{self.node} on {ray.get_runtime_context().get_node_id()}"

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Nothing was started."""


class First:
    """The worker of an engine on several nodes, which speaks to those of the others."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def asked(self) -> list[str]:
        assert self.site.parts is not None
        return [*self.site.parts.call("ended"), self.site.address, *self.site.others]

    def close(self) -> None:
        """See Part."""


def first_of(config: Any, number: int, parts: Workers, others: tuple[str, ...]) -> First:
    return First(Site(parts, f"engine {number}", others))


def part_of(config: Any, number: int, node: int) -> Part:
    return Part(10 * number + node)
