"""Measures each part of a weight sync to SGLang servers by itself: the constants of sync_model.py.
The plain broadcast that the benchmark is held against is here too."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.rollout.engines.sglang.broadcast import BroadcastSync
from megatron_stare.rollout.engines.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.engines.sglang.disk_sync import DiskSync, drawn_folder
from megatron_stare.rollout.engines.sglang.sync import Bucket, Sent, WeightSync
from megatron_stare.rollout.engines.sglang.target import TargetServer, make_sync
from megatron_stare.rollout.engines.sglang.update import WeightUpdate
from megatron_stare.weights.sync.stream_plan import BucketLayout


class Servers:
    """Times what all servers of a run take for one thing at a time, asked by this process alone.

    Args:
        layouts: of the servers, in the order of the clients.
        buckets: of the whole model.
        shared: folder that `disk` writes below.
    """

    def __init__(
        self,
        clients: Sequence[SGLangClient],
        servers: Sequence[TargetServer],
        buckets: Sequence[BucketLayout],
        model: str,
        shared: str,
    ) -> None:
        self._clients, self._model, self._shared = list(clients), model, shared
        self._layouts = [server.layout for server in servers]
        self._shape, self._dtype = servers[0].shape, servers[0].dtype
        self.buckets = [
            layout.tensors(torch.randn(layout.numel, dtype=layout.dtype)) for layout in buckets
        ]
        tensors = [tensor for bucket in self.buckets for tensor in bucket]
        self._few = [next(tensor for tensor in tensors if tensor[0] == "model.norm.weight")]
        # a quarter of all
        self._some = [tensor for tensor in tensors if tensor[0] == "model.embed_tokens.weight"]
        self._broadcast = BroadcastSync(self._clients, 600)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._broadcast.meet(self._layouts))

    def checksums(self) -> float:
        """Until every server has hashed what it holds."""
        return self._took(everywhere(*(client.checksums() for client in self._clients)))

    def bare(self) -> float:
        """The whole weights from this process, where they lie end to end: the endpoints that SGLang
        has for it, and nothing around them."""
        return self._took(self._sent(self._broadcast, self.buckets))

    def constants(self, method: str) -> dict[str, float]:
        """Seconds of what a sync by the method asks servers for, beside the bytes of a whole model.

        Returns:
            `update`: one of nothing, from the pause to the resumed servers; `session`, opened and
            closed; `request`: a bucket of few bytes, `disk_request` a folder of them; `body_mb`:
            10^6 bytes in the body of a request.
        """
        sync = self.sync(method)
        empty = WeightUpdate(self._clients, self._broadcast, 0, self._shape, self._dtype, proven={})
        found = {"update": self._took(empty.begin()) + self._took(empty.end_sent(Sent()))}
        found["session"] = self._took(self._sent(self._broadcast, []))
        if isinstance(sync, DiskSync):
            found["disk_request"] = self._took(self._sent(sync, [self._few])) - found["session"]
            sync.forget()
            return found
        found["request"] = (self._took(self._sent(sync, [self._few] * 5)) - found["session"]) / 5
        if method == "tensor":
            some = self._took(self._sent(sync, [self._some])) - found["session"] - found["request"]
            found["body_mb"] = some / (sum(tensor.nbytes for _, tensor in self._some) / 1e6)
        return found

    def sync(self, method: str) -> WeightSync:
        """This process's end of a method."""
        if method == "distributed":
            return self._broadcast
        return make_sync(method, self._clients, self._model, 600, folder=drawn_folder(self._shared))

    def say(self, version: int) -> None:
        """Has all servers say that they hold weights of a version."""
        self.run(everywhere(*(client.publish_version(str(version)) for client in self._clients)))

    def update(self, sync: WeightSync, version: int) -> WeightUpdate:
        """The servers' end of an update that is proven."""
        return WeightUpdate(self._clients, sync, version, self._shape, self._dtype)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    async def _sent(self, sync: WeightSync, buckets: Sequence[Bucket]) -> None:
        await sync.open()
        await sync.meet(self._layouts)
        for bucket in buckets:
            await sync.send(bucket)
        await sync.load(sync.left())

    def _took(self, work: Any) -> float:
        start = time.perf_counter()
        self._loop.run_until_complete(work)
        return time.perf_counter() - start

    def close(self) -> None:
        self._loop.run_until_complete(self._broadcast.close())
        self._loop.run_until_complete(everywhere(*(client.close() for client in self._clients)))
        self._loop.close()


def rates(sizes: list[int], shared: str) -> dict[str, float]:
    """Seconds that a core takes for the bytes of the whole model: to `copy` them to memory it has,
    to `copy_new` to memory that is new, to `hash` them, to `write` them to a file that is on disk
    then, and to copy them from the file, mapped as servers do it, to memory it has (`mapped`)."""
    found = {}
    source = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    into = [torch.ones_like(buffer) for buffer in source]
    found["copy"] = timed(
        lambda: [to.copy_(buffer) for to, buffer in zip(into, source, strict=True)]
    )
    found["copy_new"] = timed(lambda: [buffer.clone() for buffer in source])
    found["hash"] = timed(
        lambda: [hashlib.sha256(buffer.numpy().data).digest() for buffer in source]
    )
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        file = Path(folder) / "model.safetensors"

        def written() -> None:
            with file.open("wb") as stream:
                for buffer in source:
                    stream.write(buffer.numpy().data)
                stream.flush()
                os.fsync(stream.fileno())

        def mapped() -> None:
            with safe_open(file, "pt") as opened:
                for number, to in enumerate(into):
                    to.copy_(opened.get_tensor(str(number)))

        found["write"] = timed(written)
        save_file({str(number): buffer for number, buffer in enumerate(source)}, file)
        found["mapped"] = timed(mapped)
    return found


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class PlainBroadcast:
    """This process and `receivers` more in a gloo group, that broadcast buffers of `sizes` bytes
    when asked."""

    def __init__(self, sizes: list[int], receivers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(receivers)]
        self._orders = [here for here, _ in pipes]
        where = f"file://{self._folder.name}/ranks"
        self._receivers = [
            context.Process(target=receive, args=(where, rank + 1, receivers + 1, sizes, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._receivers:
            process.start()
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=receivers + 1)
        self._pair = dist.new_group([0, 1])
        self._buffers = buffers(sizes)

    def seconds(self) -> float:
        """Until all have all."""
        for orders in self._orders:
            orders.send("all")
        return broadcast(self._buffers, None)

    def seconds_to_one(self) -> float:
        """Until one other alone has all."""
        for orders in self._orders:
            orders.send("one")
        return broadcast(self._buffers, self._pair)

    def __enter__(self) -> PlainBroadcast:
        return self

    def __exit__(self, *_: object) -> None:
        for orders in self._orders:
            orders.send("end")
        dist.destroy_process_group()
        for process in self._receivers:
            process.join()
        self._folder.cleanup()


def receive(where: str, rank: int, world: int, sizes: list[int], orders: Connection) -> None:
    """One of the other processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    pair, into = dist.new_group([0, 1]), buffers(sizes)
    while (order := orders.recv()) != "end":
        if order == "all" or rank == 1:
            broadcast(into, None if order == "all" else pair)
    dist.destroy_process_group()


def broadcast(through: list[Tensor], group: Any) -> float:
    """Seconds, from all being there to all having all."""
    dist.barrier(group)
    start = time.perf_counter()
    for buffer in through:
        dist.broadcast(buffer, src=0, group=group)
    dist.barrier(group)
    return time.perf_counter() - start


def buffers(sizes: list[int]) -> list[Tensor]:
    return [torch.ones(size, dtype=torch.uint8) for size in sizes]
