"""Finds this machine's network addresses and free TCP ports. Checks whether a program listens at an
address."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence

import psutil

from megatron_stare.errors import ConfigError

LOOPBACK, EVERYWHERE = "127.0.0.1", "0.0.0.0"
CONNECT_S = 10.0
TRIED = 100  # ports tried before a range counts as full

_reserved: list[tuple[str, socket.socket]] = []  # at most one


def interface_address(name: str) -> str:
    """Returns the IPv4 address of a network interface of this machine.

    Raises:
        ConfigError: the interface does not exist, or has no IPv4 address.
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
    """Returns the name of this machine's network interface that has the given IPv4 address, or None
    if no interface has this address."""
    for name, found in sorted(psutil.net_if_addrs().items()):
        if any(each.family == socket.AF_INET and each.address == address for each in found):
            return name
    return None


def require_own_address(host: str, where: str) -> None:
    """Raises ConfigError if `host` is not an address of this machine. The argument `where` is the
    name of the setting that the error message mentions."""
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


def free_port(host: str, ports: Sequence[int], following: int = 0) -> int:
    """Returns a free TCP port at `host`, an address of this machine. The port is drawn at random
    from `ports`. The number 0 in `ports` stands for any port. The argument `following` is the
    number of additional free ports that must come directly after the returned port.

    Raises:
        ConfigError: none of the ports that were tried is free.
    """
    with _bound(host, ports, following) as held:
        port: int = held.getsockname()[1]
        return port


def reserve_port(host: str, ports: Sequence[int]) -> int:
    """Works like `free_port`, but also binds a socket to the returned port, so that no other
    program can take the port. The port stays bound until `reserved` returns the socket to a caller,
    or until this process reserves another port."""
    held = _bound(host, ports)
    port: int = held.getsockname()[1]
    _reserved[:] = [(f"{host}:{port}", held)]  # an earlier one closes
    return port


def reserved(address: str) -> socket.socket | None:
    """Returns the bound socket of `address`, a host:port that this process reserved with
    `reserve_port`. The caller of `reserved` owns the returned socket. Returns None if this process
    did not reserve `address`. If this process has reserved a different address, the function
    releases the port of that address."""
    found = [held for kept, held in _reserved if kept == address]
    _reserved.clear()
    return found[0] if found else None


def _bound(host: str, ports: Sequence[int], following: int = 0) -> socket.socket:
    for port in random.SystemRandom().sample(ports, min(TRIED, len(ports))):
        held = socket.socket()
        try:
            held.bind((host, port))
            for later in range(port + 1, port + 1 + following):
                with socket.socket() as probe:
                    probe.bind((host, later))
            return held
        except OSError:
            held.close()
    raise ConfigError(
        f"no port between {ports[0]} and {ports[-1]} is free on {host}",
        where="runtime.ports",
        fix=(
            "end programs that listen there, name another range, or an address of this machine"
            " (sglang.host)"
        ),
    )


def by_number(address: str) -> str:
    """Replaces the host name in a host:port by the host's IPv4 address.

    Ray uses gRPC. To resolve a host name, gRPC asks DNS servers and may ignore /etc/hosts, in which
    many clusters list their nodes. The returned address comes from this machine's own resolver. The
    host name is not replaced if the resolver finds no address of the host, or if all addresses of
    the host are loopback addresses. An argument that does not have the form host:port is returned
    unchanged.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host or host.startswith("["):
        return address
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError):
        return address
    numbers = [str(each[4][0]) for each in found]
    return next((f"{each}:{port}" for each in numbers if not each.startswith("127.")), address)


class Listener:
    """A program that should be listening at a host:port on the network.

    Args:
        address: host:port. An address without a numeric port cannot be checked and counts as
            listening.
        own: another address of this machine. This address is also tried if the host is localhost.
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
        self._failing: float | None = None  # begin of the latest row of failed probes of `gone`
        self._probed = 0.0  # last failed probe of `gone`

    def missing(self, timeout_s: float = CONNECT_S) -> Exception | None:
        """Tries to connect to the listener. Returns None if the connection succeeds, and the error
        if the connection fails."""
        reason: Exception | None = None
        for host in self._hosts:
            try:
                socket.create_connection((host, self._port), timeout_s).close()
                return None
            except (OSError, OverflowError) as error:
                reason = error
        return reason

    def require(self, what: str, where: str, fix: str) -> None:
        """Raises ConfigError if nothing listens at the address. The value of the argument `what` is
        the beginning of the error's text."""
        if (reason := self.missing()) is not None:
            why = getattr(reason, "strerror", None) or reason
            raise ConfigError(f"{what} {self.address}: {why}", where=where, fix=fix)

    def gone(self, after_s: float, timeout_s: float) -> bool:
        """Tries to connect to the listener. Returns True if two conditions both hold: this attempt
        fails, and the current series of failed attempts began more than `after_s` seconds ago.

        Each call of `gone` makes one attempt. If an attempt succeeds, the next failed attempt
        begins a new series. If more than `after_s` seconds pass between two failed attempts, the
        later attempt also begins a new series.
        """
        now = time.monotonic()
        if self.missing(timeout_s) is None:
            self._failing = None
            return False
        if self._failing is None or now - self._probed > after_s:
            self._failing = now
        self._probed = now
        return now - self._failing > after_s
