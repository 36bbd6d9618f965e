"""How fast a run's weights get into its SGLang servers, against a plain gloo broadcast of the same
bytes.

A run's own ranks and engines, placed by Ray, without a step of training: a trainer of as many
pipeline stages as asked for, each with a group of its own, and servers of several ranks. They take
turns, so that a change of the machine's speed meets all:

- "plain": torch.distributed's broadcast, of the buckets' sizes, from one process to as many others
  as the servers have ranks, with nothing around it;
- "checksums": the servers' own pass over the weights they hold, all at once, which every proved
  sync waits for;
- "bare": what SGLang's endpoints take for a broadcast of the same buckets from one process that has
  them ready, without a trainer, a gather or a proof; a sync by these endpoints cannot be faster;

and by each of the three ways of syncing, `disk` through a folder in memory,

- "transfer": sessions opened, the ranks' gather, the buckets sent, loaded into the model, sessions
  closed;
- "proved": a whole sync, from the pause to the resumed servers: of `distributed` by the run's
  engines, as between two steps; of the others the servers' end is this process, which saves two
  calls of Ray.

What the object store and the driver carry of it is read from Ray's counter of bytes that were ever
put there, and from the driver's sockets and its memory. The constants of benchmarks/sync_model.py
are measured in the same turns.

    python benchmarks/weight_sync.py        # needs scripts/setup_sglang.sh; four minutes
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Ray gives its workers, and so the servers, less of a busy machine than the plain broadcast would
# get
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
import torch
from machine import forget_peak, machine, process_memory
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc
from sync_parts import PlainBroadcast, Servers, rates, timed
from tiny import save_tiny

from megatron_stare.cluster.ray_runner import RayRunner
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.sync import Sent
from megatron_stare.rollout.engines.sglang.target import ServersTarget

RESULT = Path(__file__).parent / "results/weight_sync.json"
TARGETS = {"transfer_of_plain": 0.85, "proved_of_bound": 0.8}
REPEATS = {"distributed": 9, "disk": 5, "tensor": 3}  # of turns, at most
# where `disk` writes: in memory, so that its rows do not hang on what the disk is at
SHARED = "/dev/shm"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sync", choices=REPEATS, nargs="+", default=[*REPEATS])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=16_000)
    parser.add_argument("--bucket-mb", type=int, default=128)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of a server")
    parser.add_argument("--stages", type=int, default=2, help="of the trainer's pipeline")
    parser.add_argument("--repeats", type=int, default=9, help=f"at most {REPEATS}")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(folder, args.vocab, args.hidden, args.layers)
        runner = RayRunner(resolve_run(config_of(args, folder)))
        try:
            measure(args, folder, runner)
        finally:
            runner.close()


def config_of(args: argparse.Namespace, folder: str) -> Config:
    return Config.model_validate(
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
            "sglang": {
                "sync": "distributed",
                "tensor_parallel": args.ranks,
                "start_timeout_s": 900,
            },
            "runtime": {"object_store_mb": 200},
        }
    )


def measure(args: argparse.Namespace, folder: str, runner: RayRunner) -> None:
    """Writes the result after every turn."""
    exported = runner.trainers.export()
    sizes = [layout.nbytes for layout in exported.layouts]
    runner.engines.update_weights(0, exported)
    target = runner.engines._target
    assert isinstance(target, ServersTarget)
    clients = [SGLangClient(server.url, server.api_key, 600) for server in target.servers]
    servers = Servers(clients, target.servers, exported.layouts, folder, SHARED)
    with PlainBroadcast(sizes, args.servers * args.ranks) as plain:
        for method in args.sync:
            way, rows, carried = Way(method, runner, servers, target), [], []
            for turn in range(args.warm_up + min(args.repeats, REPEATS[method])):
                row = {
                    "plain": plain.seconds(),
                    "checksums": servers.checksums(),
                    "bare": servers.bare(),
                }
                row["transfer"] = way.transfer()
                before = carried_so_far()
                forget_peak()
                held = process_memory("VmRSS")
                row["proved"] = way.proved(turn + 1)
                after = carried_so_far() | {
                    "driver_memory_mb": (process_memory("VmHWM") - held) / 1e6
                }
                row |= (
                    {"link": plain.seconds_to_one()}
                    | rates(sizes, SHARED)
                    | servers.constants(method)
                )
                row["ray_call"] = timed(lambda: runner.trainers._workers.call("stage"))
                if turn >= args.warm_up:
                    rows.append(row)
                    carried.append({name: after[name] - before.get(name, 0.0) for name in after})
                    save(args, method, result_of(args, rows, carried, sizes))
    servers.close()


class Way:
    """The run's ranks and servers, and one way of syncing between them."""

    def __init__(
        self, method: str, runner: RayRunner, servers: Servers, target: ServersTarget
    ) -> None:
        self._runner, self._servers, self._method = runner, servers, method
        self._target = target  # the run's own keeps its senders
        if method != "distributed":
            other = replace(target, method=method, sync_folder=SHARED)
            self._target = other.joined([other])

    def transfer(self) -> float:
        """Seconds of what moves and loads the weights."""
        sync = self._servers.sync(self._method)
        start = time.perf_counter()
        exported = self._runner.trainers.export()
        exported.prepare(self._target, prove=False)
        self._servers.run(sync.open())
        sent = Sent.by_all(exported.send_to(self._target, prove=False))
        self._servers.run(sync.load(sent.folder))
        took = time.perf_counter() - start
        exported.forget()
        return took

    def proved(self, version: int) -> float:
        """Seconds of a whole sync."""
        if self._method == "distributed":
            # as the run's engines left them, whatever was measured behind their backs
            self._servers.say(version - 1)
            return timed(
                lambda: self._runner.engines.update_weights(version, self._runner.trainers.export())
            )
        return timed(lambda: self._update(version))

    def _update(self, version: int) -> None:
        """Updates weights as EnginePool does, with the servers' end in this process."""
        update = self._servers.update(self._servers.sync(self._method), version)
        exported = self._runner.trainers.export()
        exported.prepare(self._target, prove=True)
        self._servers.run(update.begin())
        sent = exported.send_to(self._target, prove=True)
        self._servers.run(update.end_sent(Sent.by_all(sent)))
        if self._target.leaves_files:
            exported.forget()


def save(args: argparse.Namespace, method: str, result: dict[str, Any]) -> None:
    args.out.parent.mkdir(exist_ok=True)
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    known = known if "syncs" in known else {"syncs": {}}
    known["machine"], known["targets"] = machine(), TARGETS
    known["syncs"][method] = result
    args.out.write_text(json.dumps(known, indent=1) + "\n")
    print(method, json.dumps(result["seconds"]), json.dumps(result["carried"]), flush=True)


def result_of(
    args: argparse.Namespace,
    rows: list[dict[str, float]],
    carried: list[dict[str, float]],
    sizes: list[int],
) -> dict[str, Any]:
    """Medians over the turns; shares turn by turn, and their medians."""
    shares = {
        "transfer_of_plain": [row["plain"] / row["transfer"] for row in rows],
        "proved_of_bound": [(row["plain"] + row["checksums"]) / row["proved"] for row in rows],
        # the most that these could be by SGLang's endpoints, and how much of that they are
        "bare_of_plain": [row["plain"] / row["bare"] for row in rows],
        "bare_of_bound": [(row["plain"] + row["checksums"]) / bare_proved(row) for row in rows],
        "transfer_of_bare": [row["bare"] / row["transfer"] for row in rows],
        "proved_of_bare": [bare_proved(row) / row["proved"] for row in rows],
    }
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "sync")}
    return {
        "settings": settings | {"repeats": len(rows)},
        "mb": round(sum(sizes) / 1e6, 1),
        "seconds": {
            name: round(statistics.median(row[name] for row in rows), 5) for name in rows[0]
        },
        "turns": [{name: round(value, 5) for name, value in row.items()} for row in rows],
        "shares": {name: [round(share, 3) for share in found] for name, found in shares.items()},
        "share_medians": {
            name: round(statistics.median(found), 3) for name, found in shares.items()
        },
        # most of any turn, MB
        "carried": {name: round(max(row[name] for row in carried), 3) for name in carried[0]},
    }


def bare_proved(row: dict[str, float]) -> float:
    """Seconds of SGLang's endpoints for a whole sync: bare, the checksums, and the calls of an
    update around them."""
    return row["bare"] + row["checksums"] + row["update"] - row["session"]


def carried_so_far() -> dict[str, float]:
    """MB that were ever put into the object stores of all nodes, and that the driver's open sockets
    have carried."""
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
        found[f"driver_{name[6:]}_mb"] = (
            sum(int(n) for line in mine for n in re.findall(rf"{name}:(\d+)", line)) / 1e6
        )
    return found


if __name__ == "__main__":
    main()
