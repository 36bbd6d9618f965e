"""The ways of weights from ranks to servers, tried before anything is made: who reaches whom,
counted and named."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support import sglang_servers as servers

from megatron_stare.cluster.routes import Door, Tried, require_folder, require_reach, unreachable
from megatron_stare.errors import ConfigError
from megatron_stare.rollout.engines.replicas import replica_route


def test_a_door_is_tried_by_connecting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert Door("node0", "a", address).missing("a") is None
    assert "refused" in (Door("node0", "a", address).missing("a") or "")


def test_the_loopback_of_another_node_is_not_tried() -> None:
    """Something else may listen at that port here."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        door = Door("node0", "a", f"127.0.0.1:{listening.getsockname()[1]}")
        assert door.missing("b") == "it is the loopback of node0"


def test_servers_that_ranks_do_not_reach_are_counted_and_the_first_is_named() -> None:
    doors = [Door(f"node{n}", str(n), f"10.0.0.{n}:30000") for n in range(3)]
    assert unreachable(doors, [Tried("node0", {}), Tried("node1", {})]) is None
    error = unreachable(
        doors, [Tried("node0", {}), Tried("node1", {2: "Connection refused", 0: "No route"})]
    )
    assert error is not None and error.where == "sglang.host"
    assert (
        error.what
        == "2 of 3 servers cannot be reached by ranks that send to them: rank 1 on node1 does not"
        " reach server 2 on node2 at 10.0.0.2:30000 (Connection refused)"
    )
    assert "runtime.interface" in (error.fix or "")


class Hosts:
    """Hosts of workers on nodes of these names. Their folders are apart unless `shared`."""

    def __init__(self, nodes: Sequence[str], shared: bool = True) -> None:
        self.nodes, self.shared, self.asked = nodes, shared, []  # type: ignore[var-annotated]

    def everywhere(self, name: str, *args: Any) -> list[Any]:
        self.asked.append(name)
        answers = {
            "open_door": lambda node: Door(node, node, "127.0.0.1:9"),
            "try_doors": lambda node: Tried(
                node, {n: w for n, d in enumerate(*args) if (w := d.missing(node))}
            ),
            "leave_in": lambda node: str(Path(*args) / "left"),
            "sees": lambda node: (node, self.shared or node == "node0"),
        }
        return [answers.get(name, lambda node: None)(node) for node in self.nodes]

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)


def test_doors_are_closed_whatever_was_found() -> None:
    ranks, there = Hosts(["node0", "node0"]), Hosts(["node0", "node1"])
    with pytest.raises(
        ConfigError, match=r"2 of 2 servers .* rank 0 on node0 does not reach server 0 on node0"
    ):
        require_reach(ranks, there, None, None)
    assert there.asked == ["open_door", "close_door"]


def test_a_folder_that_a_node_does_not_see_is_refused_with_its_name() -> None:
    ranks = Hosts(["node0", "node0"])
    require_folder("/shared", ranks, [Hosts(["node0", "node1"])])
    with pytest.raises(
        ConfigError,
        match=r"1 of 2 servers cannot see .* /tmp/own; the first of them is server 1 on node1",
    ) as error:
        require_folder("/tmp/own", ranks, [Hosts(["node0", "node1"], shared=False), Hosts([])])
    assert error.value.where == "sglang.sync_folder" and "run.dir" in (error.value.fix or "")
    assert ranks.asked[-1] == "take_away"


def test_what_is_tried_is_what_servers_are_asked_for() -> None:
    found = replica_route(servers.config(sync="disk", sync_folder="/shared", host="0.0.0.0"))
    assert found is not None and (found.listens, found.host, found.folder) == (
        True,
        "0.0.0.0",
        "/shared",
    )
    found = replica_route(servers.config(sync="distributed", sync_folder="/shared"))
    assert found is not None and found.folder is None
    assert replica_route(servers.config(urls=["http://localhost:1"])) is None
