"""How fast weights get into an SGLang server: every method of `sglang.sync`, against a plain gloo broadcast.

The plain broadcast is torch.distributed's, of the same bytes in buffers of the same size, between two processes of this
machine, with nothing around it. A sync is timed as a run does it: from the pause, over every bucket with its checksums
on both ends, to the comparison, the published version and the resumed server. "transfer" is the same without what
proves it: opening the session, moving the buckets, loading them into the model, closing the session. "checksums" is the
server's own pass over the weights it holds, which every sync waits for: with it no sync can reach more of the plain
broadcast than "bound". They take turns, so that a change of the machine's speed meets all.

    python benchmarks/weight_sync.py        # needs scripts/setup_sglang.sh
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from machine import machine
from tiny import save_tiny
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.models import read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.rollout.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.sglang.replica import SGLangReplica, make_sync
from megatron_stare.rollout.sglang.server_layout import ServerLayout
from megatron_stare.rollout.sglang.sync import Bucket, WeightSync
from megatron_stare.rollout.sglang.update import WeightUpdate
from megatron_stare.weights.hf_folder import HfFolder

RESULT = Path(__file__).parent / "results/weight_sync.json"
METHODS = ("distributed", "tensor", "disk")
TARGET = 0.5  # of the plain broadcast's throughput, for `distributed`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16_000)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(folder, args.vocab, args.hidden, args.layers)
        measure(args, folder)


def measure(args: argparse.Namespace, folder: str) -> None:
    """Writes the result after every turn."""
    buckets = buckets_of(folder, args.bucket_mb * 2**20)
    shape = read_shape(folder)
    size = sum(tensor.nbytes for bucket in buckets for _, tensor in bucket)
    config = Config.model_validate({"model": {"path": folder}, "rollout": {"engine": "sglang"}})
    engine = SGLangReplica(config, 0).engine()
    loop = asyncio.new_event_loop()
    assert engine.process is not None
    clients = [SGLangClient(engine.process.url, engine.process.api_key, 600)]
    syncs = {method: make_sync(method, clients, folder, 600) for method in METHODS}
    with PlainBroadcast([sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets]) as plain:
        rows: list[dict[str, float]] = []
        try:
            for turn in range(args.repeats + 1):
                row = {"plain_broadcast": plain.seconds()}
                row["checksums"] = loop.run_until_complete(checksums(clients))
                for method, sync in syncs.items():
                    row[f"{method}_transfer"] = loop.run_until_complete(transfer(sync, buckets))
                    row[method] = loop.run_until_complete(whole(clients, sync, turn, shape, buckets))
                rows.append(row)
                if turn:  # the first warms up
                    save(result_of(args, rows[1:], size, len(buckets)))
        finally:
            for sync in syncs.values():
                loop.run_until_complete(sync.close())
            for client in clients:
                loop.run_until_complete(client.close())
            loop.close()
            engine.close()


def save(result: dict[str, Any]) -> None:
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["mb_per_s"]), result["distributed_of_plain"], flush=True)


def result_of(args: argparse.Namespace, rows: list[dict[str, float]], size: int, buckets: int) -> dict[str, Any]:
    """Medians over the repeats; shares of the plain broadcast turn by turn."""

    def shares(name: str) -> list[float]:
        return [round(row["plain_broadcast"] / row[name], 3) for row in rows]

    return {
        "machine": machine(),
        "settings": vars(args),
        "model_mb": round(size / 1e6, 1),
        "buckets": buckets,
        "mb_per_s": {name: round(size / 1e6 / statistics.median(row[name] for row in rows), 1) for name in rows[0]},
        "distributed_of_plain": shares("distributed"),
        "distributed_of_plain_median": statistics.median(shares("distributed")),
        "distributed_transfer_of_plain": shares("distributed_transfer"),
        "distributed_transfer_of_plain_median": statistics.median(shares("distributed_transfer")),
        "bound_median": round(
            statistics.median(r["plain_broadcast"] / (r["plain_broadcast"] + r["checksums"]) for r in rows), 3
        ),
        "target": TARGET,
    }


def buckets_of(folder: str, bound: int) -> list[Bucket]:
    """The folder's tensors as the trainer's stream gives them: whole, in views of flat buffers of at most `bound`
    bytes; a larger tensor goes alone."""
    source, groups, held = HfFolder(folder), [], 0
    for name in sorted(source.names()):
        tensor = source.slice(name)[:]
        if not groups or held + tensor.nbytes > bound:
            groups.append([])
            held = 0
        groups[-1].append((name, tensor))
        held += tensor.nbytes
    found: list[Bucket] = []
    for group in groups:
        flat = torch.cat([tensor.reshape(-1) for _, tensor in group])
        parts = flat.split([tensor.numel() for _, tensor in group])
        found.append([(name, part.view(t.shape)) for (name, t), part in zip(group, parts, strict=True)])
    return found


async def transfer(sync: WeightSync, buckets: list[Bucket]) -> float:
    """Seconds of one update by the sync alone."""
    start = time.perf_counter()
    await sync.begin([ServerLayout()])
    for bucket in buckets:
        await sync.send(bucket)
    await sync.end()
    return time.perf_counter() - start


async def checksums(clients: list[SGLangClient]) -> float:
    """Seconds until every server has hashed what it holds."""
    start = time.perf_counter()
    await everywhere(*(client.checksums() for client in clients))
    return time.perf_counter() - start


async def whole(
    clients: list[SGLangClient], sync: WeightSync, version: int, shape: ModelShape, buckets: list[Bucket]
) -> float:
    """Seconds of one update as a run does it."""
    start = time.perf_counter()
    update = WeightUpdate(clients, sync, version, shape, torch.float32)
    await update.begin()
    for bucket in buckets:
        await update.send(bucket)
    await update.end()
    return time.perf_counter() - start


class PlainBroadcast:
    """Two processes of one gloo group, this one the sender, that broadcast buffers of `sizes` bytes when asked."""

    def __init__(self, sizes: list[int]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        where = f"file://{self._folder.name}/ranks"
        self._receiver = context.Process(target=receive, args=(where, sizes, theirs))
        self._receiver.start()
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)
        self._buffers = buffers(sizes)

    def seconds(self) -> float:
        self._orders.send(True)
        dist.barrier()
        start = time.perf_counter()
        for buffer in self._buffers:
            dist.broadcast(buffer, src=0)
        dist.barrier()
        return time.perf_counter() - start

    def __enter__(self) -> PlainBroadcast:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.send(False)
        dist.destroy_process_group()
        self._receiver.join()
        self._folder.cleanup()


def receive(where: str, sizes: list[int], orders: Connection) -> None:
    """The other process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=1, world_size=2)
    into = buffers(sizes)
    while orders.recv():
        dist.barrier()
        for buffer in into:
            dist.broadcast(buffer, src=0)
        dist.barrier()
    dist.destroy_process_group()


def buffers(sizes: list[int]) -> list[Tensor]:
    return [torch.ones(size, dtype=torch.uint8) for size in sizes]


if __name__ == "__main__":
    main()
