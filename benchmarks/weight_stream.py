"""The live weights of a TP2 x PP2 model streamed to one rank, against a plain all-gather of the
same bytes.

Four gloo ranks do both in one run, turn by turn, so that a change of the machine's speed meets
both. The all-gather is the plainest there can be: each rank contributes a quarter of the model's
bytes from one flat buffer, and one collective leaves all of them in a buffer on every rank,
allocated beforehand. It knows no names and no layouts, and every rank holds the model. The stream
makes whole Hugging Face tensors out of Megatron's shards, in buckets of bounded size with a
checksum of each tensor; only the sender gets them, so it moves a quarter of the all-gather's
traffic. The same stream without checksums, and a plain gather to one rank, which has the stream's
traffic, are reported beside.

    python benchmarks/weight_stream.py
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from machine import machine
from ranks import measured, seconds, shape_of

from megatron_stare.config.schema import ModelConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.export.export import PolicyStream, shards
from megatron_stare.megatron.model.model import build_model, named_parameters
from megatron_stare.weights.sync.stream import stream
from megatron_stare.weights.sync.stream_plan import plan_stream

RESULT = Path(__file__).parent / "results/weight_stream.json"
PARALLEL = ParallelConfig(tensor=2, pipeline=2)
TARGET = 0.6  # of the all-gather's throughput


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=16_000)
    parser.add_argument("--bucket-mb", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    measured(one_rank, PARALLEL.world_size, args)


def one_rank(rank: int, folder: Path, args: argparse.Namespace, report: Any) -> None:
    """Measures on this rank; the first one reports."""
    torch.set_num_threads(1)
    shape = shape_of(args)
    layout = parallel_layout.join(PARALLEL, rank, f"file://{folder}/ranks", seed=1, timeout_s=600)
    model = build_model(shape, ModelConfig(path="unused"), PARALLEL, layout)
    with torch.no_grad():
        for _, parameter in named_parameters(model):
            parameter.normal_()
    group, bound = dist.group.WORLD, args.bucket_mb * 2**20
    policy = PolicyStream(model, shape, layout, bound)
    plan = plan_stream(shards(model, layout), shape, bound, group)
    model_bytes = sum(bucket.nbytes for bucket in plan.layouts)
    quarter = torch.randn(model_bytes // 4 // layout.world)
    whole = torch.empty(layout.world, quarter.numel())

    def streamed() -> None:
        policy.begin()
        for _ in policy.layouts:
            policy.next()
        policy.end()

    def unchecked() -> None:
        for _ in stream(plan, shards(model, layout), group):
            pass

    ways: dict[str, Callable[[], Any]] = {
        "stream": streamed,
        "all_gather": lambda: dist.all_gather_single(whole.view(-1), quarter),
        "stream_without_checksums": unchecked,
        "gather": lambda: dist.gather(quarter, list(whole) if rank == 0 else None),
    }
    for way in ways.values():  # warm up
        seconds(way)
    times = [{name: seconds(way) for name, way in ways.items()} for _ in range(args.repeats)]
    if rank == 0:
        report.send(result_of(times, model_bytes, args, len(plan.buckets)))
    parallel_layout.leave()


def result_of(
    times: list[dict[str, float]], model_bytes: int, args: argparse.Namespace, buckets: int
) -> dict:
    """Medians over the repeats; ratios of throughputs turn by turn."""
    ratios = [row["all_gather"] / row["stream"] for row in times]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    return {
        "machine": machine(),
        "settings": settings,
        "layout": "TP2 x PP2, gloo",
        "model_mb": round(model_bytes / 1e6, 1),
        "buckets": buckets,
        "mb_per_s": {
            name: round(model_bytes / 1e6 / statistics.median(row[name] for row in times), 1)
            for name in times[0]
        },
        "stream_of_all_gather": [round(ratio, 3) for ratio in ratios],
        "stream_of_all_gather_median": round(statistics.median(ratios), 3),
        "stream_of_gather_median": round(
            statistics.median(row["gather"] / row["stream"] for row in times), 3
        ),
        "target": TARGET,
    }


if __name__ == "__main__":
    main()
