"""Servers of a run listen on one address, and the rest of the run reaches them at it."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from support import sglang_servers as servers

from megatron_stare.config.schema import Config, RuntimeConfig
from megatron_stare.errors import ConfigError
from megatron_stare.models import read_shape
from megatron_stare.process.network import by_number, interface_of, require_own_address
from megatron_stare.rollout.engines.replicas import Site, make_part, make_replica
from megatron_stare.rollout.engines.sglang.place import this_host
from megatron_stare.rollout.engines.sglang.replica import check_servers, server_options

SHAPE = read_shape(servers.MODEL)
OWN = "127.0.0.5"  # an address of this machine that is not the one it takes by itself


def stand_in(folder: Path) -> Path:
    """Stands for SGLang: it says what it was told, on standard error, and ends with its starter."""
    script = folder / "python"
    script.write_text('#!/bin/sh\necho "told $*" >&2\nexec cat\n')
    script.chmod(0o755)
    return script


def config(python: Path, **sglang: object) -> Config:
    return servers.config(python=str(python), device="cpu", **sglang)


@pytest.mark.parametrize(
    ("host", "listens", "reached"),
    [(None, OWN, OWN), ("0.0.0.0", "0.0.0.0", OWN), ("127.0.0.9", "127.0.0.9", "127.0.0.9")],
)
def test_a_server_listens_on_its_own_node_s_address_and_is_reached_there(
    tmp_path: Path, host: str | None, listens: str, reached: str
) -> None:
    replica = make_replica(config(stand_in(tmp_path), host=host), 0, Site(address=OWN))
    try:
        process = replica._process  # type: ignore[attr-defined]
        assert process.url.rpartition(":")[0] == f"http://{reached}"
        assert process.api_key  # it asks for a key wherever it listens
        words = server_options(config(stand_in(tmp_path), host=host), address=OWN).arguments(1)
        assert words[words.index("--host") + 1] == listens
    finally:
        replica.close()


def test_a_part_on_another_node_listens_on_that_node_s_address(tmp_path: Path) -> None:
    part = make_part(config(stand_in(tmp_path), tensor_parallel=2, nodes=2), 0, 1, OWN)
    assert part._options.host == OWN  # type: ignore[attr-defined]


def test_an_address_that_the_node_does_not_have_is_refused_with_those_it_has(
    tmp_path: Path,
) -> None:
    """Before the server is started; its worker says so, who alone knows where it is."""
    with pytest.raises(ConfigError, match=r"has no address 203\.0\.113\.7 to listen on") as error:
        make_replica(config(stand_in(tmp_path), host="203.0.113.7"), 0, Site())
    assert error.value.where == "sglang.host" and "127.0.0.1" in str(error.value)
    require_own_address("127.0.0.1", "sglang.host")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"host": "node7"}, "'node7' is no IPv4 address"),
        ({"host": "::1"}, "'::1' is no IPv4 address"),
        (
            {"host": "10.0.0.7", "tensor_parallel": 2, "nodes": 2},
            "10.0.0.7 is an address that one node alone can have",
        ),
        (
            {"host": "127.0.0.1", "tensor_parallel": 2, "nodes": 2},
            "127.0.0.1 is an address that other nodes do not",
        ),
    ],
)
def test_an_address_that_cannot_be_that_of_all_servers_is_refused(
    tmp_path: Path, asked: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        check_servers(config(stand_in(tmp_path), **asked), SHAPE)
    assert error.value.where == "sglang.host" and "leave it out" in str(error.value)


def test_a_cluster_s_servers_have_their_node_s_address_and_a_run_s_own_ray_loopback() -> None:
    ray = pytest.importorskip("megatron_stare.cluster.ray")

    def told(**runtime: object) -> str:
        return ray.server_address(
            servers.config().model_copy(update={"runtime": RuntimeConfig(**runtime)})
        )

    joined = {"ray_address": "10.0.0.1:6379"}
    assert told(interface="lo") == told(interface="lo", **joined) == "127.0.0.1"
    elsewhere = [
        name
        for name, found in psutil.net_if_addrs().items()
        if name != "lo" and found[0].family == 2
    ]
    for name in elsewhere[:1]:
        assert told(interface=name, **joined) != "127.0.0.1" and told(interface=name) == "127.0.0.1"
    with pytest.raises(ConfigError, match="no network interface 'eth99'"):
        told(interface="eth99", **joined)


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") is None


def test_a_container_with_a_network_or_memory_of_its_own_is_another_machine() -> None:
    """Alike in name and boot, as containers of one machine may be."""
    assert "net:[" in this_host() and "shm:" in this_host()


@pytest.mark.parametrize(
    ("address", "answers", "expected"),
    [
        ("node0:6379", ["10.0.0.5"], "10.0.0.5:6379"),
        # Debian names a machine's own host in /etc/hosts
        ("node0:6379", ["127.0.1.1", "10.0.0.5"], "10.0.0.5:6379"),
        ("node0:6379", ["127.0.1.1"], "node0:6379"),
        ("node0:6379", [], "node0:6379"),
        ("ray://node0:10001", ["10.0.0.5"], "ray://node0:10001"),
        ("[::1]:6379", ["10.0.0.5"], "[::1]:6379"),
        ("auto", ["10.0.0.5"], "auto"),
    ],
)
def test_a_node_s_name_becomes_its_address_for_grpc(
    address: str, answers: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolver(host: str, port: int, *_: object) -> list[tuple[object, ...]]:
        if not answers:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (each, port)) for each in answers]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert by_number(address) == expected
