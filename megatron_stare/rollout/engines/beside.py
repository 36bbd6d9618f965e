"""A replica on several nodes: the parts of it that others than its own worker hold."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megatron_stare.process.workers import Workers


class ReplicaPart(ABC):
    """What a replica of several nodes has on one of the others: a worker there, which the replica's own speaks to."""

    @abstractmethod
    def start(self, meeting: str) -> None:
        """Starts it, after ending one that was started before. Args: meeting: host:port where all parts meet."""

    @abstractmethod
    def ended(self) -> str | None:
        """How it ended, with its last words; None: it has not, or has not been started."""

    @abstractmethod
    def memory_mb(self) -> float:
        """Of its processes, 10^6 bytes."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it. Stopping twice is allowed."""

    def close(self) -> None:
        """Ends it with its worker."""
        self.stop()


@dataclass(frozen=True)
class Beside:
    """The other nodes of a replica.

    parts: its parts there, in the order of the nodes.
    address: of the replica's own node, where the others reach it.
    others: addresses of the others.
    """

    parts: Workers
    address: str
    others: tuple[str, ...]
