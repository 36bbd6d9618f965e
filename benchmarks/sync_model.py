"""Predicts a weight sync's seconds by a formula: of the CPU benchmark, beside its rows, and of 32B
on a cluster.

    python benchmarks/sync_model.py

Seconds of a sync, from what it is made of (megatron/export/stage_send.py,
rollout/engines/sglang/update.py):

    plain        the bytes, broadcast to all ranks of all servers
    transfer     gather + moved + load + calls
    proved       transfer + the servers' checksum pass + the senders' hashes + the calls of an
                 update around it

`moved` is the broadcast, the writing of files, or the way through the bodies of requests; `calls`
are one of Ray for each turn of the senders, and of the servers a session and a request a bucket, or
one that loads a folder.

No row is among the constants, and none of them was fitted to rows. On the CPU benchmark each is
measured in the same turns, by itself (benchmarks/sync_parts.py), on processes that share its cores:
work of several processes at once takes its sum over the cores, but for the broadcast, whose rounds
wait for each other. For the cluster, constants are cited; where none was found that isolates a
part, one that holds the part and more is taken in its place, so the sum errs on the slow side.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parent / "results/weight_sync.json"


@dataclass(frozen=True)
class Job:
    """Weight sync from `stages` senders in `buckets` buckets. Each of `receivers` ranks of servers
    holds `share` of the model."""

    method: str
    receivers: int
    share: float
    stages: int
    buckets: int


@dataclass(frozen=True)
class Constants:
    """Seconds, for all bytes of the model where it is about bytes.

    broadcast: to all receivers.
    moved: by the method, to where servers load from.
    gather: into buckets, as far as it does not happen while others wait.
    load: into the servers' parameters, of all ranks that share a processor.
    checksums: the servers' pass over what they hold.
    hash: of what is sent, as far as it does not happen while others wait.
    ray_call: one call of all trainer ranks.
    session: opened and closed; update: all calls of one, a session among them.
    request: a bucket of few bytes, or a folder of them.
    """

    broadcast: float
    moved: float
    gather: float
    load: float
    checksums: float
    hash: float
    ray_call: float
    session: float
    update: float
    request: float


def seconds(job: Job, of: Constants) -> dict[str, float]:
    """By row of the benchmark."""
    # all write their files at once
    turns, requests = (1, 1) if job.method == "disk" else (job.stages, job.buckets)
    calls = (turns + 1) * of.ray_call + of.session + requests * of.request
    transfer = of.gather + of.moved + of.load + calls
    around = of.update - of.session + 2 * of.ray_call
    return {
        "plain": of.broadcast,
        "transfer": transfer,
        "proved": transfer + of.checksums + of.hash + around,
    }


def measured_job(method: str, result: Mapping[str, Any]) -> Job:
    """Job of a method's entry in the benchmark's results."""
    settings = result["settings"]
    ranks, stages = settings["ranks"], settings["stages"]
    # each stage has its own
    buckets = stages * ceil(result["mb"] * 1e6 / stages / (settings["bucket_mb"] * 2**20))
    return Job(method, settings["servers"] * ranks, 1 / ranks, stages, buckets)


def measured_constants(result: Mapping[str, Any], cores: int, job: Job) -> Constants:
    """Constants of a method's entry in the benchmark's results."""
    of, copies = result["seconds"], job.receivers * job.share / cores  # of the model, by each core
    # gloo's is a binomial tree, round by round
    broadcast = of["link"] * ceil(log2(job.receivers + 1))
    if job.method == "distributed":
        moved, load, request = broadcast, of["copy"] * copies, of["request"]
    elif job.method == "disk":
        moved, load, request = of["write"], of["mapped"] * copies, of["disk_request"]
    else:  # what a request with bytes takes was measured with their loading
        moved, load, request = of["body_mb"] * result["mb"], 0.0, of["request"]
    return Constants(
        broadcast=broadcast,
        moved=moved,
        gather=of["copy"] / min(job.stages, cores),
        load=load,
        checksums=of["checksums"],
        hash=of["hash"] / cores,
        ray_call=of["ray_call"],
        session=of["session"],
        update=of["update"],
        request=request,
    )


# Qwen2.5-32B in bfloat16 from PP4 to 16 engines of TP4 on 8 nodes of 8 GPUs
CLUSTER_GB = 65.5  # 771 tensors
NODES = 8
RECEIVERS, SHARE, STAGES, BUCKETS = 64, 1 / 4, 4, 128  # buckets of 512 MB
# GB/s of whole syncs, gather and load included, as published: slime 355B in 48 s (bfloat16),
# NeMo-RL 30B in 1 s; by flattened buckets and handles on shared GPUs, SGLang's 30B in 2.5 s
SLIME_GB_S, NEMO_GB_S, SGLANG_GB_S = 2 * 355 / 48, 2 * 30 / 1.0, 2 * 30 / 2.5
HBM_GB_S = 3350.0  # of an H100 SXM, NVIDIA's data sheet
# over the bytes, of the senders' hash: 22 operations twice, each reads and writes, some in int64
HASH_PASSES = 100
# What a node reads of shared storage, and as much is taken for writing, as quoted of NVIDIA's
# reference architectures: what a DGX H100 is to get at the least, and what one of a SuperPOD reads
# by GPUDirect Storage
STORAGE_GB_S = (8.0, 40.0)
HOST_GB_S = 25.0  # from host memory to a GPU, as planning/gpus.py assumes
PUBLISHED = {
    "NeMo-RL 30B-A3B, NCCL reshard, H100": "0.74 to 1.00 s",
    "SGLang flattened buckets 30B, shared GPUs": "2.5 s",
    "verl 30B, H20": "4.4 s",
    "verl 235B, H20": "23.7 s",
    "checkpoint-engine 235B, 8 x H800": "6.2 s",
    "slime 355B": "48 s",
}
TARGET_S = 8.0


def cluster_job(method: str) -> Job:
    return Job(method, RECEIVERS, SHARE, STAGES, BUCKETS)


def cluster_constants(job: Job, gb_s: float, calls: Constants) -> Constants:
    """Args: gb_s: of a whole published sync, which holds gather and load; of `disk`, of a node's
    storage. calls: measured, on a busy CPU."""
    broadcast = CLUSTER_GB / (gb_s if job.method == "distributed" else SLIME_GB_S)
    moved, load = CLUSTER_GB / gb_s, 0.0  # load is within a published rate
    if job.method == "disk":
        # a stage a node writes; each node reads all
        moved = CLUSTER_GB / gb_s / min(STAGES, NODES) + CLUSTER_GB / gb_s
        load = CLUSTER_GB * SHARE / HOST_GB_S
    return Constants(
        broadcast=broadcast,
        moved=moved,
        gather=0.0,  # within the published rates; much below that of a disk
        load=load,
        checksums=CLUSTER_GB * SHARE / HBM_GB_S,
        hash=CLUSTER_GB * HASH_PASSES / HBM_GB_S,  # senders take turns; none of it hidden
        ray_call=calls.ray_call,
        session=calls.session,
        update=calls.update,
        request=calls.request,
    )


def report(measured: Mapping[str, Any]) -> str:
    """Report of the predictions, beside what was measured and published."""
    lines, cores = ["CPU benchmark: predicted, measured, ratio"], measured["machine"]["cores"]
    of: dict[str, Constants] = {}
    for method, result in measured["syncs"].items():
        job = measured_job(method, result)
        of[method] = measured_constants(result, cores, job)
        for row, predicted in seconds(job, of[method]).items():
            found = result["seconds"][row]
            lines.append(
                f"  {method:12} {row:9} {predicted:7.3f} s {found:7.3f} s  {predicted / found:.2f}"
            )
    lines.append(f"32B, {CLUSTER_GB} GB, 16 engines of TP4: predicted")
    for method, rates in (
        ("distributed", {"slime's rate": SLIME_GB_S, "NeMo-RL's": NEMO_GB_S}),
        ("tensor", {"SGLang's rate": SGLANG_GB_S}),
        ("disk", {f"{rate:g} GB/s a node": rate for rate in STORAGE_GB_S}),
    ):
        for name, rate in rates.items():
            job = cluster_job(method)
            rows = seconds(job, cluster_constants(job, rate, of.get(method, of["distributed"])))
            took = f"transfer {rows['transfer']:.2f} s, proved {rows['proved']:.2f} s"
            lines.append(f"  {method} at {name} ({rate:.1f} GB/s): {took}")
    lines += ["published", *(f"  {name}: {took}" for name, took in PUBLISHED.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(json.loads(MEASURED.read_text())))
