"""The distributed select over 2^24 keys on four ranks, against a local torch.topk of one rank's
share.

All ranks run both, turn by turn, one thread each and warmed up. Where there are fewer cores than
ranks the ranks share them, in the select and in torch.topk alike, so wall times of both are longer
than on cores of their own; CPU times are not. Bytes are counted where they are sent: at every
all-reduce.

    python benchmarks/distributed_select.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from machine import machine

from megatron_stare.ops import statistics_executor as select
from megatron_stare.ops.statistics_executor import kth_largest
from megatron_stare.records.batch_statistics import ordering_key

RESULT = Path(__file__).parent / "results/distributed_select.json"
MOST_BYTES, MOST_TIMES = 64 * 1024, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=2**24, help="of all ranks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.1, help="selected")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(rank, f"file://{folder}/ranks", args) for rank in range(args.ranks)]
        with multiprocessing.get_context("spawn").Pool(args.ranks) as pool:
            ranks = pool.starmap(measure, jobs, chunksize=1)
    result = summary(args, ranks)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(rank: int, init: str, args: argparse.Namespace) -> dict[str, Any]:
    """This rank's wall and CPU seconds by what was run, a list over the repeats; and the bytes of
    every round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=args.ranks)
    sent: list[int] = []

    def counted(tensor: torch.Tensor, **options: Any) -> None:
        sent.append(tensor.nbytes)
        dist.all_reduce(tensor, **options)

    select.all_reduce = counted  # type: ignore[assignment]
    local = args.keys // args.ranks
    # surprisals of tokens that are mostly sure
    surprisal = torch.empty(local).exponential_(2.0, generator=torch.Generator().manual_seed(rank))
    keys = ordering_key(surprisal, rank + args.ranks * torch.arange(local))
    mask = torch.ones(local, dtype=torch.bool)
    k, own = torch.tensor([int(args.share * local) * args.ranks]), int(args.share * local)
    runs: dict[str, Callable[[], Any]] = {
        "select": lambda: kth_largest([keys], [mask], k, dist.group.WORLD),
        "topk of the keys": lambda: torch.topk(keys, own),
        "unsorted topk of the keys": lambda: torch.topk(keys, own, sorted=False),
        "topk of the surprisals": lambda: torch.topk(surprisal, own),
        "unsorted topk of the surprisals": lambda: torch.topk(surprisal, own, sorted=False),
    }
    # warm up, and check: as many keys at or above it as were asked for
    (threshold,) = runs["select"]()
    chosen = (keys >= threshold).sum()
    dist.all_reduce(chosen)
    assert chosen == k
    rounds = list(sent)
    for run in runs.values():
        run()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            taken[name].append(timed(run))
    dist.destroy_process_group()
    return {"rounds": rounds, "taken": taken}


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds (all threads) of this rank; all ranks start together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def summary(args: argparse.Namespace, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats of the slowest rank's wall time and of the mean CPU time, and ratios
    pair by pair."""

    def of(name: str, which: int) -> list[float]:
        rows = zip(*([pair[which] for pair in rank["taken"][name]] for rank in ranks), strict=True)
        return [max(row) if which == 0 else statistics.fmean(row) for row in rows]

    result: dict[str, Any] = {
        "machine": machine(),
        "settings": {
            "keys": args.keys,
            "ranks": args.ranks,
            "share": args.share,
            "repeats": args.repeats,
        },
        "threads_a_rank": 1,
        "rounds": len(ranks[0]["rounds"]),
        "bytes_a_round": max(ranks[0]["rounds"]),
        "bytes_target": MOST_BYTES,
        "times_target": MOST_TIMES,
        "note": (
            "a rank's share is keys / ranks; wall: the slowest rank, ranks share the cores; cpu:"
            " mean over ranks"
        ),
    }
    for which, clock in enumerate(("wall", "cpu")):
        taken = {name: of(name, which) for name in ranks[0]["taken"]}
        ratios = {
            name: sorted(one / other for one, other in zip(taken["select"], times, strict=True))
            for name, times in taken.items()
            if name != "select"
        }
        result[clock] = {
            "seconds": {name: round(statistics.median(times), 4) for name, times in taken.items()},
            "select_against": {
                name: {
                    "median": round(statistics.median(each), 3),
                    "from": round(each[0], 3),
                    "to": round(each[-1], 3),
                }
                for name, each in ratios.items()
            },
        }
    against = [each["median"] for each in result["wall"]["select_against"].values()]
    result["reached"] = {
        "bytes": result["bytes_a_round"] <= MOST_BYTES,
        "times": max(against) <= MOST_TIMES,
    }
    return result


if __name__ == "__main__":
    main()
