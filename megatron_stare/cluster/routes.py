"""Tries the ways of weights from ranks to servers, and the folder between them, before any of these
is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.errors import ConfigError
from megatron_stare.process.network import LOOPBACK, Listener
from megatron_stare.process.workers import Handle

TRY_S = 10.0  # that a connection within a cluster may take


@dataclass(frozen=True)
class Door:
    """A port that is listened on where a server will be.

    node: name of its node.
    id: of the node, as the cluster has it.
    """

    node: str
    id: str
    address: str

    def missing(self, id: str) -> str | None:
        """Says why it is not reached from the node of this id, where this process is; None: it
        is."""
        if id != self.id and self.address.startswith(f"{LOOPBACK.partition('.')[0]}."):
            return f"it is the loopback of {self.node}"
        reason = Listener(self.address, LOOPBACK).missing(TRY_S)
        return None if reason is None else str(getattr(reason, "strerror", None) or reason)


@dataclass(frozen=True)
class Tried:
    """Findings of a rank. node: name of its own; unreached: by number of the server, why."""

    node: str
    unreached: dict[int, str]


class Hosts(Protocol):
    """Processes that are to host workers, and can be asked before they do; see RayWorkers."""

    def everywhere(self, name: str, *args: Any) -> list[Handle]:
        """Starts a call of each."""

    def wait(self, handles: Sequence[Handle]) -> list[Any]:
        """The results of calls, in order; raises the first error."""


def require_reach(ranks: Hosts, servers: Hosts, interface: str | None, host: str | None) -> None:
    """Has every rank connect to a port where each server will listen.

    Args:
        interface, host: `runtime.interface` and `sglang.host`.

    Raises:
        ConfigError: a node lacks the address, or a rank reaches a server's not.
    """
    try:
        doors: list[Door] = servers.wait(servers.everywhere("open_door", interface, host))
        tried: list[Tried] = ranks.wait(ranks.everywhere("try_doors", doors))
    finally:
        servers.wait(servers.everywhere("close_door"))
    if error := unreachable(doors, tried):
        raise error


def unreachable(doors: Sequence[Door], tried: Sequence[Tried]) -> ConfigError | None:
    """The error that counts and names what cannot be reached; None: all can."""
    lost = [
        (rank, server, why)
        for rank, each in enumerate(tried)
        for server, why in each.unreached.items()
    ]
    if not lost:
        return None
    rank, server, why = lost[0]
    door = doors[server]
    return ConfigError(
        f"{len({number for _, number, _ in lost})} of {len(doors)} servers cannot be reached by"
        f" ranks that send to them: rank {rank} on {tried[rank].node} does not reach server"
        f" {server} on {door.node} at {door.address} ({why})",
        where="sglang.host",
        fix=(
            "leave sglang.host out, so that each server listens on its own node's address, and"
            " let runtime.interface name a network that joins all nodes, without a firewall"
            " between them"
        ),
    )


def require_folder(folder: str, ranks: Hosts, readers: Sequence[Hosts]) -> None:
    """Has the first rank's node leave a file in the folder, for which all others look.

    Raises:
        ConfigError: a node cannot write there, or does not see it.
    """
    left = ranks.wait(ranks.everywhere("leave_in", folder)[:1])[0]
    try:
        for what, workers in (("rank", ranks), *(("server", each) for each in readers)):
            seen: list[tuple[str, bool]] = workers.wait(workers.everywhere("sees", left))
            if blind := [(number, node) for number, (node, there) in enumerate(seen) if not there]:
                nodes = sorted({node for _, node in blind})
                raise ConfigError(
                    f"{len(blind)} of {len(seen)} {what}s cannot see the files that the first rank"
                    f" writes to {folder}; the first of them is {what} {blind[0][0]} on"
                    f" {nodes[0]}{f', {len(nodes)} nodes in all' if len(nodes) > 1 else ''}",
                    where="sglang.sync_folder",
                    fix=(
                        "name a folder on a file system that all nodes share, or put run.dir on one"
                    ),
                )
    finally:
        ranks.wait(ranks.everywhere("take_away", left)[:1])
