"""Describes the machine and the visible GPUs of a process. The machine and the GPUs determine which
memory handles the process can open."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import torch

from megatron_stare.errors import ConfigError
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.transport import LOOPBACK_NAMES

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Place:
    """Machine of a process, and the UUIDs of the GPUs that the process sees. `host` and `gpus` are
    empty if their values are unknown.

    `others`: addresses of the other machines on which the server has ranks.
    """

    host: str = ""
    gpus: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


@cache
def this_host() -> str:
    """Returns a text that identifies this machine or container. The returned text contains the host
    name and, where they exist, the boot id, the network namespace, and the device number of the
    shared memory. Any two machines or containers differ in at least one of host name, boot id,
    network namespace and shared memory."""
    told = [socket.gethostname(), _BOOT.read_text().strip() if _BOOT.is_file() else ""]
    if _NETWORK.exists():
        told.append(os.readlink(_NETWORK))
    if SHARED_MEMORY.exists():
        told.append(f"shm:{SHARED_MEMORY.stat().st_dev}")
    return " ".join(filter(None, told))


def uuid_of(device: int) -> str:
    """Returns a GPU's UUID in the form that SGLang uses. SGLang finds the GPU of a memory handle by
    the GPU's UUID."""
    return str(torch.cuda.get_device_properties(device).uuid)


def here(device: torch.device) -> Place:
    """Returns the Place that consists of this machine and the GPU `device`."""
    return Place(
        this_host(),
        (uuid_of(torch.cuda.current_device() if device.index is None else device.index),),
    )


def seen_here() -> Place:
    """Returns the Place that consists of this machine and every GPU visible to this process.
    Servers started by this process see the same GPUs as this process."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Place(this_host(), tuple(uuid_of(number) for number in gpus))


def require_reach(server: Place, sender: Place, url: str) -> None:
    """Raises ConfigError if the server's ranks cannot open memory handles of the sender's GPU.
    SGLang searches for the sender's GPU among the GPUs that the server sees, and crashes if the
    sender's GPU is missing."""
    fix = "sglang.sync=distributed reaches servers on any machine and GPU"
    if server.others:
        raise ConfigError(
            f"ranks of the server are on {', '.join(server.others)} as well: handles of GPU memory"
            " work on one machine only",
            where=url,
            fix=fix,
        )
    if not server.host or not server.gpus:
        raise ConfigError(
            "the GPUs of the server are not known, so no handle can be sent to it",
            where=url,
            fix=fix,
        )
    if server.host != sender.host:
        raise ConfigError(
            f"the server runs on {server.host.split()[0]}, this rank on {sender.host.split()[0]}:"
            " handles of GPU memory work on one machine only",
            where=url,
            fix=fix,
        )
    if missing := [gpu for gpu in sender.gpus if gpu not in server.gpus]:
        raise ConfigError(
            f"the server does not see this rank's GPU {missing[0]}", where=url, fix=fix
        )


def carriers(
    servers: Sequence[tuple[str, Place, ServerLayout]], ranks: Sequence[Place]
) -> list[tuple[int, ...]]:
    """Chooses one trainer rank for each server rank. The same trainer rank can be chosen for
    several server ranks. A server rank can open the memory of the chosen trainer rank. On GPUs, a
    server rank and the chosen trainer rank are on the same GPU. On CPUs, a server rank and the
    chosen trainer rank are on the same machine. On CPUs, the trainer ranks of a machine are
    assigned to the machine's server ranks round-robin.

    Args:
        servers: URL, place and layout of each server. The place of a server on GPUs lists the GPUs
            in the order of the server's ranks.
        ranks: places of all ranks of the trainer.

    Raises:
        ConfigError: no rank of the trainer is on the GPU or machine of a server's rank, or a
            server's ranks are on several machines, or the GPUs of a server's ranks are not all
            known.
    """
    found, taken = [], Counter[str]()
    for url, place, layout in servers:
        on_gpus = layout.device == "cuda"
        if place.others or (on_gpus and (not place.host or len(place.gpus) < layout.tensor)):
            require_reach(place, Place(place.host), url)
            raise ConfigError(
                f"the server sees {len(place.gpus)} GPUs, but has {layout.tensor} ranks", where=url
            )
        there = [number for number, rank in enumerate(ranks) if rank.host == place.host]
        if on_gpus:
            of = {gpu: number for number in there for gpu in ranks[number].gpus}
            if missing := [gpu for gpu in place.gpus[: layout.tensor] if gpu not in of]:
                raise _no_rank(f"on GPU {missing[0]} of {place.host.split()[0]}", url)
            found.append(tuple(of[gpu] for gpu in place.gpus[: layout.tensor]))
            continue
        if not there:
            raise _no_rank(f"on {place.host.split()[0]}", url)
        found.append(
            tuple(there[(taken[place.host] + rank) % len(there)] for rank in range(layout.tensor))
        )
        taken[place.host] += layout.tensor
    return found


def _no_rank(where: str, url: str) -> ConfigError:
    return ConfigError(
        f"the server is {where}, but no trainer rank is, so the server can open no rank's memory",
        where=url,
        fix="set sglang.sync=disk, or, with sglang.colocated=false, distributed",
    )


def require_loopback_here(server: Place, url: str) -> None:
    """Raises ConfigError if the server runs on another machine and listens only on loopback."""
    if urlsplit(url).hostname in LOOPBACK_NAMES and server.host not in ("", this_host()):
        raise ConfigError(
            f"the server listens on the loopback of {server.host.split()[0]}, where this rank"
            " cannot reach it",
            where=url,
            fix="leave sglang.host out: each server then listens on its own node's address",
        )
