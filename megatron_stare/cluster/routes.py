"""Tests whether weights can get from the ranks to the servers, over the network or through the sync
folder. The tests run before ranks and servers are created."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_stare.errors import ConfigError
from megatron_stare.process.network import LOOPBACK, Listener
from megatron_stare.process.workers import Handle

TRY_S = 10.0  # timeout of a connection within the cluster


@dataclass(frozen=True)
class Door:
    """Test port on a node on which a server will start later. The ranks connect to the test port
    before the server starts.

    `node`: name of the node.
    `id`: the id of the node in the cluster.
    `address`: host:port.
    """

    node: str
    id: str
    address: str

    def missing(self, id: str) -> str | None:
        """Returns the reason why this process cannot connect to the port, or None if this process
        can connect. `id` is the id of the node on which this process runs."""
        if id != self.id and self.address.startswith(f"{LOOPBACK.partition('.')[0]}."):
            return f"it is the loopback of {self.node}"
        reason = Listener(self.address, LOOPBACK).missing(TRY_S)
        return None if reason is None else str(getattr(reason, "strerror", None) or reason)


@dataclass(frozen=True)
class Tried:
    """Result of a rank's connection tests.

    `node`: name of the rank's node.
    `unreached`: the servers that the rank cannot reach. The dict maps the index of each unreachable
        server to the reason why the connection failed.
    """

    node: str
    unreached: dict[int, str]


class Hosts(Protocol):
    """Group of processes that take part in the tests of connections and of the sync folder. The
    tests run before the processes host workers. RayWorkers implements this protocol."""

    def everywhere(self, name: str, *args: Any) -> list[Handle]:
        """Starts a call of the method `name` on each process, and returns the handles of the
        calls."""

    def wait(self, handles: Sequence[Handle]) -> list[Any]:
        """Returns the results of the calls in order, or raises the first error."""


def require_reach(ranks: Hosts, servers: Hosts, interface: str | None, host: str | None) -> None:
    """Makes every rank connect to a test port at each server's address.

    Args:
        interface, host: `runtime.interface` and `sglang.host`.

    Raises:
        ConfigError: a node lacks the address, or a rank cannot reach a server's address.
    """
    try:
        doors: list[Door] = servers.wait(servers.everywhere("open_door", interface, host))
        tried: list[Tried] = ranks.wait(ranks.everywhere("try_doors", doors))
    finally:
        servers.wait(servers.everywhere("close_door"))
    if error := unreachable(doors, tried):
        raise error


def unreachable(doors: Sequence[Door], tried: Sequence[Tried]) -> ConfigError | None:
    """Returns an error that names unreachable servers, or None if all servers are reachable."""
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
    """Makes the first rank write a file to the sync folder `folder`. Then every rank and every
    server process looks for the file of the first rank.

    Raises:
        ConfigError: the first rank cannot write to the folder, or another process does not see the
            file.
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
