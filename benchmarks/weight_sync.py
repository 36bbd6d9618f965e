"""How fast a run's weights get into its SGLang servers, against a plain gloo broadcast of the same bytes.

A run's own ranks and engines, placed by Ray, without a step of training: a trainer of as many pipeline stages as asked
for, each with a group of its own, and servers of several ranks. They take turns, so that a change of the machine's
speed meets all:

- "plain": torch.distributed's broadcast, of the buckets' sizes, from one process to as many others as the servers have
  ranks, with nothing around it;
- "checksums": the servers' own pass over the weights they hold, all at once, which every proved sync waits for;
- "transfer": sessions opened, the ranks' gather, the buckets sent, loaded into the model, sessions closed;
- "proved": a whole sync, as a run does it between two steps, from the pause to the resumed servers.

What the object store and the driver carry of it is read from Ray's counter of bytes that were ever put there, and from
the driver's sockets and its memory. The constants of benchmarks/sync_model.py are measured in the same turns.

    python benchmarks/weight_sync.py                      # distributed; needs scripts/setup_sglang.sh
    python benchmarks/weight_sync.py --sync disk          # each adds its own to benchmarks/results/weight_sync.json
    python benchmarks/weight_sync.py --sync tensor --repeats 1 --warm-up 0
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import ray
import torch
import torch.distributed as dist
from machine import forget_peak, machine, process_memory
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
from tiny import save_tiny
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.orchestration.ray_runner import RayRunner
from megatron_stare.resolved import resolve_run
from megatron_stare.rollout.sglang.broadcast import BroadcastSync
from megatron_stare.rollout.sglang.client import SGLangClient, everywhere
from megatron_stare.rollout.sglang.methods import make_sync
from megatron_stare.rollout.sglang.sender import Sent
from megatron_stare.rollout.sglang.server_outlet import SGLangOutlet

RESULT = Path(__file__).parent / "results/weight_sync.json"
TARGETS = {"transfer_of_plain": 0.85, "proved_of_bound": 0.8}
MB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sync", choices=("distributed", "disk", "tensor"), default="distributed")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16_000)
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of a server")
    parser.add_argument("--stages", type=int, default=2, help="of the trainer's pipeline")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(folder, args.vocab, args.hidden, args.layers)
        config = Config.model_validate(
            {
                "model": {"path": folder},
                "parallel": {"pipeline": args.stages},
                "rollout": {
                    "engine": "sglang",
                    "engines": args.servers,
                    "max_prompt_tokens": 64,
                    "max_new_tokens": 64,
                    "sync_bucket_mb": args.bucket_mb,
                },
                "sglang": {"sync": args.sync, "tensor_parallel": args.ranks, "start_timeout_s": 900},
                "runtime": {"object_store_mb": 200},
            }
        )
        runner = RayRunner(resolve_run(config))
        try:
            measure(args, runner)
        finally:
            runner.close()


def measure(args: argparse.Namespace, runner: RayRunner) -> None:
    """Writes the result after every turn."""
    pool, exported = runner.engines, runner.trainers.export()
    sizes = [layout.nbytes for layout in exported.layouts]
    pool.update_weights(0, exported)
    outlet = pool._outlet
    assert isinstance(outlet, SGLangOutlet)
    loop = asyncio.new_event_loop()
    clients = [SGLangClient(route.url, route.api_key, 600) for route in outlet.servers]
    small = BroadcastSync(clients, 600)
    loop.run_until_complete(small.meet([route.layout for route in outlet.servers]))
    rows: list[dict[str, float]] = []
    carried: list[dict[str, float]] = []
    with PlainBroadcast(sizes, args.servers * args.ranks) as plain:
        for turn in range(args.warm_up + args.repeats):
            row = {"plain": plain.seconds(), "checksums": loop.run_until_complete(checksums(clients))}
            row["transfer"] = transfer(loop, clients, runner, outlet)
            before = carried_so_far()
            forget_peak()
            held = process_memory("VmRSS")
            started = time.perf_counter()
            pool.update_weights(turn + 1, runner.trainers.export())
            row["proved"] = time.perf_counter() - started
            after = carried_so_far() | {"driver_memory_mb": (process_memory("VmHWM") - held) / 1e6}
            row["link"] = plain.seconds_to_one()
            row["ray_call"] = timed(lambda: runner.trainers._workers.call("stage"))
            row |= loop.run_until_complete(calls(clients, small, args.hidden)) | rates(sizes)
            if turn >= args.warm_up:
                rows.append(row)
                carried.append({name: after[name] - before.get(name, 0.0) for name in after})
                save(args, result_of(args, rows, carried, sizes))
    loop.run_until_complete(small.close())
    loop.run_until_complete(everywhere(*(client.close() for client in clients)))
    loop.close()


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    args.out.parent.mkdir(exist_ok=True)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    known = known if "syncs" in known else {"syncs": {}}
    known["machine"], known["targets"] = machine(), TARGETS
    known["syncs"][args.sync] = result
    args.out.write_text(json.dumps(known, indent=1) + "\n")
    print(args.sync, json.dumps(result["seconds"]), json.dumps(result["carried"]), flush=True)


def result_of(
    args: argparse.Namespace, rows: list[dict[str, float]], carried: list[dict[str, float]], sizes: list[int]
) -> dict[str, Any]:
    """Medians over the turns; shares turn by turn, and their medians."""
    shares = {
        "transfer_of_plain": [row["plain"] / row["transfer"] for row in rows],
        "proved_of_bound": [(row["plain"] + row["checksums"]) / row["proved"] for row in rows],
    }
    return {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "mb": round(sum(sizes) / 1e6, 1),
        "bucket_mb": [round(size / 1e6, 1) for size in sizes],
        "seconds": {name: round(statistics.median(row[name] for row in rows), 5) for name in rows[0]},
        "turns": [{name: round(value, 5) for name, value in row.items()} for row in rows],
        "shares": {name: [round(share, 3) for share in found] for name, found in shares.items()},
        "share_medians": {name: round(statistics.median(found), 3) for name, found in shares.items()},
        "carried": {name: round(max(row[name] for row in carried), 3) for name in carried[0]},  # most of any turn, MB
    }


def transfer(
    loop: asyncio.AbstractEventLoop, clients: list[SGLangClient], runner: RayRunner, outlet: SGLangOutlet
) -> float:
    """Seconds of what moves and loads the weights."""
    servers = make_sync(outlet.servers[0].way.method, clients, "", 600)
    start = time.perf_counter()
    exported = runner.trainers.export()
    exported.prepare(outlet, prove=False)
    loop.run_until_complete(servers.open())
    sent = Sent.by_all(exported.send_by(outlet, prove=False))
    loop.run_until_complete(servers.load(sent.folder))
    took = time.perf_counter() - start
    exported.forget()
    return took


async def checksums(clients: list[SGLangClient]) -> float:
    """Seconds until every server has hashed what it holds."""
    start = time.perf_counter()
    await everywhere(*(client.checksums() for client in clients))
    return time.perf_counter() - start


async def calls(clients: list[SGLangClient], small: BroadcastSync, hidden: int) -> dict[str, float]:
    """Seconds of one call to all servers at once; of a session of all, opened and closed; and of one bucket of a few
    bytes, broadcast to all of them."""
    start = time.perf_counter()
    for _ in range(10):
        await everywhere(*(client.model_info() for client in clients))
    called = time.perf_counter()
    await small.open()
    opened = time.perf_counter()
    for _ in range(5):
        await small.send([("model.norm.weight", torch.ones(hidden))])
    sent = time.perf_counter()
    await small.load(None)
    session = time.perf_counter() - sent + opened - called
    return {"call": (called - start) / 10, "request": (sent - opened) / 5, "session": session}


def rates(sizes: list[int]) -> dict[str, float]:
    """Seconds that a core takes for the bytes of the whole model: to copy them to memory it has, to copy them to memory
    that is new, to hash them, and to write them to a file and read it."""
    found = {}
    source = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    into = [torch.ones_like(buffer) for buffer in source]
    found["copy"] = timed(lambda: [to.copy_(buffer) for to, buffer in zip(into, source, strict=True)])
    found["copy_new"] = timed(lambda: [buffer.clone() for buffer in source])
    found["hash"] = timed(lambda: [hashlib.sha256(buffer.numpy().data).digest() for buffer in source])
    with tempfile.TemporaryFile() as file:

        def written() -> None:
            for buffer in source:
                file.write(buffer.numpy().data)
            file.flush()
            os.fsync(file.fileno())

        found["write"] = timed(written)
        file.seek(0)
        found["read"] = timed(lambda: [file.readinto(buffer.numpy().data) for buffer in into])
    return found


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def carried_so_far() -> dict[str, float]:
    """MB that were ever put into the object stores of all nodes, and that the driver's open sockets have carried."""
    stored = 0
    for node in ray.nodes():
        channel = init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
        asked = node_manager_pb2.GetNodeStatsRequest(include_memory_info=False)
        told = node_manager_pb2_grpc.NodeManagerServiceStub(channel).GetNodeStats(asked, timeout=10)
        stored += told.store_stats.cumulative_created_bytes
    found = {"object_store_mb": stored / 1e6}
    sockets = subprocess.run(["ss", "-tinpO"], capture_output=True, text=True, check=True).stdout
    mine = [line for line in sockets.splitlines() if f"pid={os.getpid()}," in line]
    for name in ("bytes_sent", "bytes_received"):
        found[f"driver_{name[6:]}_mb"] = sum(int(n) for line in mine for n in re.findall(rf"{name}:(\d+)", line)) / 1e6
    return found


class PlainBroadcast:
    """This process and `receivers` more in a gloo group, that broadcast buffers of `sizes` bytes when asked."""

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


if __name__ == "__main__":
    main()
