"""Environment variables and ports of a run's processes: what clashes is refused before anything
starts, and what does not reaches trainer ranks and servers alike."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

from megatron_stare.cli import main
from megatron_stare.cluster.ray import Actor
from megatron_stare.config.load import load_config
from megatron_stare.config.process_settings import (
    check_environment,
    check_ports,
    port_share,
    shared_environment,
)
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.process.network import free_port, interface_address, reserved
from megatron_stare.rollout.engines.sglang.replica import server_options
from megatron_stare.rollout.engines.sglang.server_options import PORTS

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
SERVED = ("rollout.engine=sglang", f"sglang.python={sys.executable}")


def config(*overrides: str) -> Config:
    return load_config(QUICKSTART, [*SERVED, *overrides])


CLASHES = [
    (
        ("runtime.env={CUDA_VISIBLE_DEVICES: '0'}",),
        "runtime.env",
        "CUDA_VISIBLE_DEVICES must not be set",
    ),
    (("runtime.env={RANK: '0'}",), "runtime.env", "RANK must not be set"),
    (("runtime.env={WORLD_SIZE: '2'}",), "runtime.env", "WORLD_SIZE must not be set"),
    (
        ("runtime.env={OMP_NUM_THREADS: '2'}",),
        "runtime.env",
        "runtime.trainer_threads and rollout.threads",
    ),
    (
        ("runtime.env={CUDA_DEVICE_MAX_CONNECTIONS: '1'}",),
        "runtime.env",
        "performance.cuda_connections",
    ),
    (
        ("runtime.env={NCCL_SOCKET_IFNAME: eth1}", "runtime.interface=eth0"),
        "runtime.env",
        "runtime.interface sets",
    ),
    (
        ("runtime.env={PYTORCH_ALLOC_CONF: a}", "performance.cuda_allocator=b"),
        "runtime.env",
        "PYTORCH_ALLOC_CONF and performance.cuda_allocator set the same thing",
    ),
    (
        (
            "runtime.env={PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}",
            "sglang.colocated=true",
        ),
        "runtime.env",
        "has expandable segments",
    ),
    (
        (
            "sglang.environment={PYTORCH_CUDA_ALLOC_CONF: 'expandable_segments:True'}",
            "sglang.colocated=true",
        ),
        "sglang.environment",
        "has expandable segments",
    ),
    (
        ("runtime.env={NCCL_CUMEM_ENABLE: '1'}", "sglang.environment={NCCL_CUMEM_ENABLE: '0'}"),
        "runtime.env",
        "1 for trainer ranks and 0 for servers",
    ),
    (
        ("runtime.env={NCCL_CUMEM_ENABLE: '0'}", "sglang.flags=[--enable-symm-mem]"),
        "runtime.env",
        "always set NCCL_CUMEM_ENABLE=1, but here it is 0",
    ),
    (
        ("runtime.env={NCCL_NVLS_ENABLE: '0'}", "sglang.flags=[--enable-nccl-nvls]"),
        "runtime.env",
        "servers with --enable-nccl-nvls always set NCCL_NVLS_ENABLE=1",
    ),
]


@pytest.mark.parametrize(("overrides", "where", "message"), CLASHES)
def test_what_clashes_is_refused_and_either_half_alone_is_not(
    overrides: tuple[str, ...], where: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_environment(config(*overrides))
    assert refused.value.where == where
    for alone in overrides if len(overrides) > 1 else ("runtime.env={NCCL_DEBUG: WARN}",):
        check_environment(config(alone))


def test_what_the_shell_says_of_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this machine inherit it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    check_environment(config())
    with pytest.raises(ConfigError, match="shell: PYTORCH_CUDA_ALLOC_CONF has expandable segments"):
        check_environment(config("sglang.colocated=true"))


def test_a_dry_run_refuses_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    local = ["train", QUICKSTART, f"model.path={ROOT / 'assets/tiny-adder'}", "--dry-run"]
    assert main([*local, "runtime.env={RANK: '3'}"]) == 2
    assert "error: runtime.env: RANK must not be set" in capsys.readouterr().err
    assert main([*local, "runtime.ports=[30000, 30002]"]) == 2
    assert "error: runtime.ports: 3 ports are too few" in capsys.readouterr().err
    assert main([*local, "runtime.ports=[30002, 30000]"]) == 2
    assert "runtime.ports: a range is [first, last]" in capsys.readouterr().err
    assert main([*local, "runtime.ports=[30000, 30003]", "runtime.env={NCCL_DEBUG: WARN}"]) == 0


def test_ranks_and_servers_get_the_same_and_servers_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "of the shell")
    asked = config(
        "runtime.env={NCCL_DEBUG: WARN, A: a}",
        "sglang.environment={A: b, C: c}",
        "runtime.interface=ib0",
    )
    shared = {
        "NCCL_DEBUG": "WARN",
        "A": "a",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "ib0",
    }
    assert shared_environment(asked) == shared
    assert (
        server_options(asked).process_environment().items()
        >= (shared | {"A": "b", "C": "c"}).items()
    )


@pytest.mark.parametrize(
    ("overrides", "cumem", "nvls"),
    [
        ((), "0", "0"),  # what servers set if they find nothing
        (("runtime.env={NCCL_CUMEM_ENABLE: '1'}",), "1", "0"),
        (("sglang.environment={NCCL_NVLS_ENABLE: '1'}",), "0", "1"),
        (("runtime.env={NCCL_NVLS_ENABLE: '2'}",), "0", "2"),
        (("sglang.flags=[--enable-symm-mem]",), "1", "1"),
        (("sglang.flags=[--enable-nccl-nvls]",), "0", "1"),
    ],
)
def test_both_ends_of_a_group_agree_on_nccls_memory(
    overrides: tuple[str, ...], cumem: str, nvls: str
) -> None:
    asked = config("sglang.sync=distributed", *overrides)
    expected = {"NCCL_CUMEM_ENABLE": cumem, "NCCL_NVLS_ENABLE": nvls}
    assert shared_environment(asked).items() >= expected.items()
    assert server_options(asked).process_environment().items() >= expected.items()
    assert not shared_environment(config()).keys() & expected.keys()  # there is no group


def test_no_two_holders_share_a_port() -> None:
    """Servers of one node start at the same time, and listen minutes later: what is free now is no
    use to tell them apart."""
    asked = config("runtime.ports=[30000, 30021]", "rollout.engines=3")
    shares = [port_share(asked, number, 3) for number in range(4)]
    ports = [port for share in shares for port in share or ()]
    assert sorted(ports) == list(range(30000, 30022))
    assert [server_options(asked, number).ports for number in range(3)] == shares[1:]
    assert port_share(config(), 0, 3) is None
    of_ours = [server_options(config("rollout.engines=4"), number).ports for number in range(4)]
    assert sorted(port for share in of_ours for port in share) == sorted(PORTS)
    check_ports(asked, 10)
    with pytest.raises(
        ConfigError, match="22 ports are too few for the trainer's ranks and 11 engines"
    ):
        check_ports(asked, 11)
    with pytest.raises(ConfigError, match="at least 32"):
        check_ports(config("runtime.ports=[30000, 30030]", "sglang.attention_data_parallel=2"), 1)


def test_a_servers_ranks_meet_in_the_range_too() -> None:
    words = server_options(config("runtime.ports=[30000, 30021]")).arguments(30001, 30003)
    assert words[words.index("--nccl-port") + 1] == "30003"
    assert "--nccl-port" not in server_options(config()).arguments(30001)


def test_a_port_and_those_after_it_are_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert free_port("127.0.0.1", [port - 1]) == port - 1
        with pytest.raises(ConfigError, match="is free on 0"):
            free_port("0.0.0.0", [port - 1], 1)


def test_a_port_is_free_and_one_of_those_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"no port between {port} and {port} is free on 127.0.0.1"
        ):
            free_port("127.0.0.1", [port])
        assert free_port("127.0.0.1", range(port, port + 3)) != port


def test_ranks_meet_at_the_interfaces_address_and_a_port_of_the_range() -> None:
    host, _, port = Actor().address("lo", range(31_900, 31_999, 7)).rpartition(":")
    assert host == "127.0.0.1" and int(port) in range(31_900, 31_999, 7)
    host, _, port = Actor().address("lo", None).rpartition(":")
    assert host == "127.0.0.1" and int(port) > 0  # any that is free, and the ranks must know which


def test_no_other_program_takes_the_port_where_the_ranks_meet() -> None:
    place = Actor().address("lo", None)
    host, _, port = place.rpartition(":")
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind((host, int(port)))
    held = reserved(place)
    assert held is not None and held.getsockname() == (host, int(port))
    held.close()
    assert reserved(place) is None  # once


def test_a_port_reserved_for_another_meeting_is_given_up() -> None:
    place, other = Actor().address("lo", None), Actor().address("lo", None)
    assert reserved(place) is None and reserved(other) is None
    for each in (place, other):
        with socket.socket() as taker:
            taker.bind(("127.0.0.1", int(each.rpartition(":")[2])))


def test_the_address_of_an_interface() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=f"{socket.gethostname()} has no network interface 'ib7'.*"
    ) as refused:
        interface_address("ib7")
    assert "interfaces there: " in str(refused.value) and "lo" in str(refused.value)
