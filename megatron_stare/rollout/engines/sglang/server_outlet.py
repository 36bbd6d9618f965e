"""The way from the trainer's ranks to a run's SGLang servers: described where the servers are known, used in the ranks
that send. Bytes go from a rank to the servers; the driver hands on this description, and what is to be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
from megatron_stare.rollout.engines.sglang.place import Place, require_loopback_here
from megatron_stare.rollout.engines.sglang.sender import Sender, Sent
from megatron_stare.rollout.engines.sglang.server_layout import ServerLayout
from megatron_stare.rollout.engines.sglang.sync import WeightSync
from megatron_stare.rollout.engines.sglang.tensor_sync import TensorSync
from megatron_stare.weights.sync.stream import Bucket


@dataclass(frozen=True)
class Way:
    """What is alike for all servers of a run.

    method: a name of `sglang.sync`.
    model_path: folder whose config servers find beside weights on a disk.
    sync_folder: of `disk`, where a folder is made; None: the system's for temporary files.
    """

    method: str
    timeout_s: float
    model_path: str
    sync_folder: str | None = None


@dataclass(frozen=True)
class ServerRoute:
    """How one server is reached, and what it holds. See weights/sync/outlet.py."""

    url: str
    api_key: str | None = field(repr=False)
    layout: ServerLayout
    place: Place
    way: Way
    shape: ModelShape
    dtype: torch.dtype  # that the server computes in

    def outlet(self, routes: Sequence[ServerRoute]) -> SGLangOutlet:
        return SGLangOutlet(tuple(routes), drawn_folder(self.way.sync_folder))


@dataclass(frozen=True)
class SGLangOutlet:
    """To all servers of a run; see weights/sync/outlet.py. `folder`: where all senders of `disk` write."""

    servers: tuple[ServerRoute, ...]
    folder: Path

    @property
    def one_sender_at_a_time(self) -> bool:
        """A server takes one update after the other, and receives and loads in one thread. Two senders at once would
        wait for each other where two servers took their broadcasts in different order."""
        return self.servers[0].way.method != "disk"

    @property
    def leaves_files(self) -> bool:
        return self.servers[0].way.method == "disk"

    @property
    def owners_send(self) -> bool:
        """Servers keep a layer's experts in one parameter. Of its hash on a GPU several senders can compute a part
        each; SHA-256, that of CPU servers, needs all of its bytes in one place."""
        return all(server.layout.device == "cuda" for server in self.servers)

    def connect(self, sender: int) -> SenderConnection:
        return SenderConnection(self, sender)


class SenderConnection:
    """A trainer rank's connection to all servers; see weights/sync/outlet.py. Its calls to them run on a thread of its
    own, so that the rank gathers the next bucket while this one is taken."""

    def __init__(self, outlet: SGLangOutlet, sender: int) -> None:
        self._outlet, way = outlet, outlet.servers[0].way
        self._loop, self._thread, self._hashing = asyncio.new_event_loop(), ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._clients = [SGLangClient(s.url, s.api_key, way.timeout_s) for s in outlet.servers]
        self._sync = make_sync(
            way.method,
            self._clients,
            way.model_path,
            way.timeout_s,
            folder=outlet.folder,
            sender=sender,
            places=[server.place for server in outlet.servers],
        )
        self._sender: Sender | None = None
        self._first: tuple[Bucket, Future[None]] | None = None  # and its hash
        self._under_way: Future[None] | None = None

    def expect(self, prove: bool, first: Bucket | None) -> None:
        """See Connection."""
        outlet, self._under_way, self._first = self._outlet, None, None
        one, layouts = outlet.servers[0], [server.layout for server in outlet.servers]
        self._sender = Sender(self._sync, one.shape, one.dtype, layouts, prove)
        if first is not None:
            self._first = first, self._hashing.submit(self._sender.hash, first.tensors())

    def begin(self) -> None:
        """See Connection."""
        for server in self._outlet.servers:
            require_loopback_here(server.place, server.url)
        assert self._sender is not None
        self._start(self._sender.begin).result()

    def send(self, bucket: Bucket) -> None:
        """See Connection."""
        self._wait()
        assert self._sender is not None
        expected, hashed = self._first or (None, None)
        self._first = None
        given = bucket.tensors(), hashed if bucket is expected else None
        self._under_way = self._start(partial(self._sender.send, *given))

    def end(self) -> Sent:
        """See Connection."""
        self._wait()
        assert self._sender is not None
        return self._sender.sent()

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
    """Makes one end of a method that `sglang.sync` names.

    Args:
        folder, sender: see DiskSync.
        places: of the servers, in the order of the clients; see TensorSync and BroadcastSync.
    """
    made: dict[str, Callable[[], WeightSync]] = {
        "tensor": lambda: TensorSync(clients, places),
        "disk": lambda: DiskSync(clients, model_path, folder, sender),
        "distributed": lambda: BroadcastSync(clients, timeout_s, places),
    }
    if method not in made:
        raise unknown_name(method, made, "sglang.sync")
    return made[method]()
