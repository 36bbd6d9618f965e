"""Network of a machine, as a run needs it: the address of an interface, ports that are free, and
what listens."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Sequence

import psutil

from megatron_stare.errors import ConfigError

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
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


def interface_of(address: str) -> str | None:
    """Name of the network interface of this machine that has an IPv4 address; None: none has."""
    for name, found in sorted(psutil.net_if_addrs().items()):
        if any(each.family == socket.AF_INET and each.address == address for each in found):
            return name
    return None


def require_own_address(host: str, where: str) -> None:
    """Raises ConfigError, of the setting `where`, for an address that this machine does not
    have."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError as error:
        found = sorted(
            a.address
            for each in psutil.net_if_addrs().values()
            for a in each
            if a.family == socket.AF_INET
        )
        raise ConfigError(
            f"{socket.gethostname()} has no address {host} to listen on"
            f" ({error.strerror or error})",
            where=where,
            fix=(
                f"addresses there: {', '.join(found)}; leave the setting out to let each server"
                " listen on its own node's address (runtime.interface, else Ray's)"
            ),
        ) from error


def free_port(host: str, ports: Sequence[int]) -> int:
    """A TCP port of an address of this machine that is free now, one of those given, drawn at
    random; 0 stands for any.

    Raises:
        ConfigError: none of them can be listened on.
    """
    for port in random.SystemRandom().sample(ports, min(TRIED, len(ports))):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            bound: int = probe.getsockname()[1]
            return bound
    raise ConfigError(
        f"no port between {ports[0]} and {ports[-1]} is free on {host}",
        where="runtime.ports",
        fix=(
            "end programs that listen there, name another range, or an address of this machine"
            " (sglang.host)"
        ),
    )


class Listener:
    """Listener at a host:port, somewhere on the network.

    Args:
        address: without a port, or with one that is no number, nothing is known of it, and it
            counts as there.
        own: another address of this machine, which is tried too where the host is this machine.
    """

    def __init__(self, address: str, own: str) -> None:
        self.address = address
        host, _, port = (
            address.removeprefix("ray://").replace("[", "").replace("]", "").rpartition(":")
        )
        known = bool(host) and port.isdigit()
        self._port = int(port) if known else 0
        self._hosts = (
            [] if not known else [host, own] if host in ("localhost", LOOPBACK) else [host]
        )
        self._there = time.monotonic()  # when it was, last

    def missing(self, timeout_s: float = CONNECT_S) -> Exception | None:
        """Why no connection is made now; None: one is."""
        reason: Exception | None = None
        for host in self._hosts:
            try:
                socket.create_connection((host, self._port), timeout_s).close()
                reason = None
                break
            except (OSError, OverflowError) as error:
                reason = error
        if reason is None:
            self._there = time.monotonic()
        return reason

    def require(self, what: str, where: str, fix: str) -> None:
        """Raises ConfigError, which begins with `what`, where nothing listens there."""
        if (reason := self.missing()) is not None:
            why = getattr(reason, "strerror", None) or reason
            raise ConfigError(f"{what} {self.address}: {why}", where=where, fix=fix)

    def gone(self, after_s: float, timeout_s: float) -> bool:
        """Tells whether nothing listens now, nor has for `after_s` seconds."""
        return self.missing(timeout_s) is not None and time.monotonic() - self._there > after_s
