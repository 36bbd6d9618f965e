"""What a run needs to know of a machine's network: the address of an interface, and ports that are free."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Sequence

import psutil

from megatron_stare.errors import ConfigError

LOOPBACK = "127.0.0.1"
CONNECT_S = 10.0
TRIED = 100  # ports of a range, before it is taken for full


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises:
        ConfigError: there is no such interface, or it has none.
    """
    found = psutil.net_if_addrs()
    for address in found.get(name, ()):
        if address.family == socket.AF_INET:
            return address.address
    raise ConfigError(
        f"{socket.gethostname()} has no network interface {name!r} with an IPv4 address",
        where="runtime.interface",
        fix=f"interfaces there: {', '.join(sorted(found))}",
    )


def free_port(host: str, ports: Sequence[int]) -> int:
    """A TCP port of an address of this machine that is free now, one of those given, drawn at random; 0 stands for any.

    Raises:
        ConfigError: none of them can be listened on.
    """
    for port in random.SystemRandom().sample(ports, min(TRIED, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            bound: int = probe.getsockname()[1]
            return bound
    raise ConfigError(
        f"no port of {host} between {ports[0]} and {ports[-1]} can be listened on",
        where="runtime.ports",
        fix="end programs that listen there, name another range, or an address of this machine (sglang.host)",
    )


def require_listener(address: str, own: str, where: str, fix: str) -> None:
    """Raises ConfigError where nothing listens at a host:port; Ray itself would try for ten minutes, and say so.

    Args:
        own: another address of this machine, which is tried too where the host is this machine.
        where: of the error.
        fix: likewise.
    """
    host, _, port = address.removeprefix("ray://").replace("[", "").replace("]", "").rpartition(":")
    if not host or not port.isdigit():
        return  # `auto`, or something that Ray refuses at once
    hosts = [host, own] if host in ("localhost", LOOPBACK) else [host]
    for each in hosts:
        try:
            socket.create_connection((each, int(port)), CONNECT_S).close()
            return
        except (OSError, OverflowError) as error:
            reason = error
    raise ConfigError(
        f"no Ray cluster can be reached at {address}: {getattr(reason, 'strerror', None) or reason}",
        where=where,
        fix=fix,
    )
