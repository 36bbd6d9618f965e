"""Describes how the trainer's ranks reach a run's SGLang servers. An engine makes the description
of the servers, and the trainer's ranks use the description to send weights to the servers. The
weights go directly from a rank to the servers. Only the description of the servers and the
checksums of the weights pass through the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_stare.errors import unknown_name
from megatron_stare.models.shape import ModelShape
from megatron_stare.process.interruption import run_on
from megatron_stare.rollout.engines.sglang.broadcast import BroadcastSync
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.disk_sync import DiskSync, drawn_folder
from megatron_stare.rollout.engines.sglang.fingerprint import checksums_of
from megatron_stare.rollout.engines.sglang.fp8_weights import as_sent
from megatron_stare.rollout.engines.sglang.place import (
    Place,
    carriers,
    here,
    require_loopback_here,
    this_host,
)
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import Sending, Sent, WeightSync
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync, packed
from megatron_stare.weights.sync.stream import Bucket
from megatron_stare.weights.sync.target import Sender, SyncTarget


@dataclass(frozen=True)
class TargetServer:
    """Address of one server, and the layout, shape and dtype of the server's weights."""

    url: str
    api_key: str | None = field(repr=False)
    layout: ServerLayout
    place: Place
    shape: ModelShape
    dtype: torch.dtype  # compute dtype of the server


@dataclass(frozen=True)
class ServersTarget(SyncTarget):
    """Some or all servers of a run, as the target of a weight sync; see SyncTarget.

    `method`: a value of `sglang.sync`.
    `timeout_s`: time limit of one call to a server, seconds.
    `model_path`: model folder whose config is copied into the folder of the weights.
    `sync_folder`: parent of the folder for weight files (`sglang.sync: disk`); None: the system's
        temporary folder.
    `colocated`: True if the servers are on the devices of the trainer's ranks.
    `servers`: in replica order.
    `folder`: folder to which all senders write weight files (`sglang.sync: disk`); None until
        `joined` chooses the folder.
    `collective_s`: time limit of one broadcast, in seconds. If `collective_s` is None, the time
        limit of one broadcast is `timeout_s`.
    """

    method: str
    timeout_s: float
    model_path: str
    sync_folder: str | None = None
    colocated: bool = False
    servers: tuple[TargetServer, ...] = ()
    folder: Path | None = None
    collective_s: float | None = None

    @property
    def broadcast_s(self) -> float:
        return self.timeout_s if self.collective_s is None else self.collective_s

    @property
    def one_sender_at_a_time(self) -> bool:
        """Returns False if the weights are sent through files, or if `shares_devices` is True.
        Returns True in all other cases. A server handles one update at a time, and receives and
        loads weights in one thread. If two senders broadcast at the same time, two servers could
        take the broadcasts in different orders and deadlock."""
        return self.method != "disk" and not self.shares_devices

    @property
    def shares_devices(self) -> bool:
        """See SyncTarget. A CPU server receives handles to shared memory only if the run started
        the server, and only if all ranks of the server are on one node. Every other CPU server
        receives the bytes of the weights. If at least one CPU server receives bytes,
        `shares_devices` is False."""
        here = all(
            s.layout.device == "cuda" or (s.place.host and not s.place.others) for s in self.servers
        )
        return self.method == "tensor" and self.colocated and here

    @property
    def leaves_files(self) -> bool:
        return self.method == "disk"

    @property
    def owners_send(self) -> bool:
        """Returns True if all servers are on GPUs and `shares_devices` is False. If `owners_send`
        is True, each rank sends the experts that the rank holds. Servers keep all experts of a
        layer in one parameter. Servers on GPUs use a hash that can be computed from parts of a
        parameter, so each sender can hash only its own experts. Servers on CPUs use SHA-256, which
        needs all bytes of the parameter in one process."""
        return not self.shares_devices and all(
            server.layout.device == "cuda" for server in self.servers
        )

    def here(self, device: torch.device) -> Place:
        """See SyncTarget."""
        return here(device) if device.type == "cuda" else Place(this_host())

    def carriers(self, places: Sequence[Place]) -> list[tuple[int, ...]]:
        """See SyncTarget."""
        return carriers(
            [(server.url, server.place, server.layout) for server in self.servers], places
        )

    def towards(self, engine: int, rank: int) -> ServersSender:
        """See SyncTarget."""
        return replace(self, servers=(self.servers[engine],)).sender(rank)

    def joined(self, targets: Sequence[ServersTarget]) -> ServersTarget:
        """See SyncTarget. Chooses the folder to which all senders write weight files if
        `sglang.sync` is `disk`."""
        servers = tuple(server for target in targets for server in target.servers)
        return replace(self, servers=servers, folder=drawn_folder(self.sync_folder))

    def sender(self, rank: int) -> ServersSender:
        return ServersSender(self, rank)


class ServersSender(Sender):
    """Sends one trainer rank's weights to the target; see Sender. The sender calls the servers on a
    separate thread, so that the rank can gather the next bucket during a call."""

    def __init__(self, target: ServersTarget, rank: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1)
        self._hashing = ThreadPoolExecutor(1)
        self._clients = [SGLangClient(s.url, s.api_key, target.timeout_s) for s in target.servers]
        self._sync = make_sync(
            target.method,
            self._clients,
            target.model_path,
            target.broadcast_s,
            folder=target.folder,
            sender=rank,
            places=[server.place for server in target.servers],
        )
        self._sending: Sending | None = None
        # first bucket and the future of its hash
        self._first: tuple[Bucket, Future[None]] | None = None
        self._under_way: Future[None] | None = None
        self._rounded: list[Sequence[tuple[str, torch.Tensor]]] = []  # see `handle`

    def expect(self, prove: bool, first: Bucket | None) -> None:
        """See Sender."""
        self._under_way = self._first = None
        one, layouts = self._target.servers[0], [server.layout for server in self._target.servers]
        self._sending = Sending(self._sync, one.shape, one.dtype, layouts, prove)
        if first is not None:
            self._first = first, self._hashing.submit(self._sending.hash, first.tensors())

    def begin(self) -> None:
        """See Sender."""
        for server in self._target.servers:
            require_loopback_here(server.place, server.url)
        assert self._sending is not None
        self._start(self._sending.begin).result()

    def handle(self, bucket: Bucket) -> str:
        """See Sender."""
        one = self._target.servers[0]
        if not one.layout.eight_bits:
            return packed(bucket.tensors())
        # the engine may still open the previous bucket, and has finished with the one before
        self._rounded = [*self._rounded[-1:], as_sent(bucket.tensors(), one.shape)]
        return packed(self._rounded[-1])

    def free(self) -> None:
        """See Sender."""
        self._rounded = []

    def send(self, bucket: Bucket, handles: Sequence[str] = ()) -> None:
        """See Sender."""
        self._wait()
        assert self._sending is not None
        expected, hashed = self._first or (None, None)
        self._first = None
        given = bucket.tensors(), hashed if bucket is expected else None
        self._under_way = self._start(partial(self._sending.send, *given, handles))

    def end(self) -> Sent:
        """See Sender."""
        self._wait()
        assert self._sending is not None
        sent = self._sending.sent()
        if not self._target.shares_devices:
            return sent
        # one sender sends everything, so nothing is merged, and checksums are far smaller
        hashed = {layout: checksums_of(ranks) for layout, ranks in sent.hashed.items()}
        return replace(sent, hashed=hashed, to=self._target.servers[0].url)

    def forget(self) -> None:
        self._sync.forget()

    def _start(self, make: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
        return self._thread.submit(run_on, self._loop, make)

    def _wait(self) -> None:
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def close(self) -> None:
        self._start(self._leave).result()
        self._thread.shutdown()
        self._hashing.shutdown()
        self._loop.close()

    async def _leave(self) -> None:
        await self._sync.close()
        await asyncio.gather(*(client.close() for client in self._clients))


def make_sync(
    method: str,
    clients: Sequence[SGLangClient],
    model_path: str,
    timeout_s: float,
    *,
    folder: Path | None = None,
    sender: int = 0,
    places: Sequence[Place] | None = None,
) -> WeightSync:
    """Makes the WeightSync of an engine or a sender. `method` is the value of `sglang.sync`.

    Args:
        folder, sender: see DiskSync.
        places: places of the servers, in the order of the clients; see TensorSync and
            BroadcastSync.
    """
    made: dict[str, Callable[[], WeightSync]] = {
        "tensor": lambda: TensorSync(clients, places),
        "disk": lambda: DiskSync(clients, model_path, folder, sender),
        "distributed": lambda: BroadcastSync(clients, timeout_s, places),
    }
    if method not in made:
        raise unknown_name(method, made, "sglang.sync")
    return made[method]()
