"""Measures what a step waits for a background checkpoint, and for one that training waits for.

Four gloo ranks, TP2 x DP2 with the distributed optimizer, hold a float32 model and Adam's two
moments, and save it turn by turn, so that a change of the machine's speed meets both ways: in the
background (`begin`: until training may go on; `whole`: until the checkpoint is complete, when
nothing trains meanwhile) and waited for (`waited`). Times are those of the slowest rank. The
folder's bytes are held against those of one copy of weights and moments. Nothing is trained: memory
that training changes while the writers read it is copied by the kernel then, at a cost that is not
in here.

Beside them Megatron's own background save (`megatron_begin`, `megatron_whole`: AsyncCallsQueue, as
its training loop has it; it makes no checksums), and ours with the first data rank alone writing
what several hold (`one_writes`). `first` is the turn before the others, in which every way starts
what it keeps; `left_mb` the memory of the processes that Megatron's way keeps between saves, of all
ranks, each page that is shared counted in parts.

    python benchmarks/checkpoint.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import psutil
import torch
import torch.distributed as dist
from machine import machine
from ranks import measured, seconds, shape_of

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.checkpoint.background_save import BackgroundSave
from megatron_stare.megatron.checkpoint.checkpoint import Saver
from megatron_stare.megatron.model.model import build_policy, named_parameters
from megatron_stare.megatron.optimizer.optimizer import build_optimizer
from megatron_stare.megatron.upstream import begin_save

RESULT = Path(__file__).parent / "results/checkpoint.json"
PARALLEL = ParallelConfig(tensor=2, data=2)
TARGET = 0.15  # of a save that is waited for


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is written to; default: a temporary one"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    measured(one_rank, PARALLEL.world_size, args, args.folder)


def one_rank(rank: int, folder: Path, args: argparse.Namespace, report: Any) -> None:
    """Measures on this rank; the first one reports."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    torch.set_num_threads(1)
    shape = shape_of(args)
    layout = parallel_layout.join(PARALLEL, rank, f"file://{folder}/ranks", seed=1, timeout_s=1800)
    model = build_policy(
        shape, ModelConfig(path="unused"), PARALLEL, layout, distributed_optimizer=True
    )
    optimizer, scheduler = build_optimizer(
        model, OptimizerConfig(distributed=True), "float32", steps=10
    )
    with torch.no_grad():  # every page has to be there
        for _, parameter in named_parameters(model):
            parameter.normal_()
        (part,) = optimizer.chained_optimizers
        part.init_state_fn(part.optimizer, part.config)
        for state in part.optimizer.state.values():
            state["step"] = torch.ones(())
            state["exp_avg"].normal_()
            state["exp_avg_sq"].normal_().abs_()
    saver, target = Saver(layout, writers=2), folder / "checkpoint"
    under_way: list[BackgroundSave] = []
    alone = Saver(layout, writers=2)
    alone._strategy = alone._strategy.base_strategy
    plans = Saver(layout, writers=2)._strategy
    calls = AsyncCallsQueue()

    def begin(by: Saver = saver) -> None:
        under_way.append(by.begin(str(target), model, optimizer, scheduler))

    def finish() -> None:
        under_way.pop().finish()

    def waited() -> None:
        begin()
        finish()

    def one_writes() -> None:
        begin(alone)
        finish()

    def megatron_begin() -> None:
        with backend():
            state = checkpoint._state(model, optimizer, scheduler, layout, (), loading=False)
            calls.schedule_async_request(begin_save(state, str(target), plans, validate=not times))

    def megatron_finish() -> None:
        with backend():
            calls.maybe_finalize_async_calls(blocking=True)

    times = []
    for _ in range(args.repeats + 1):
        row = {}
        with Fresh(target, rank):
            row["begin"] = seconds(begin)
            row["whole"] = row["begin"] + seconds(finish)
            nbytes = sum(file.stat().st_size for file in target.iterdir())
        with Fresh(target, rank):
            row["waited"] = seconds(waited)
        with Fresh(target, rank):
            row["one_writes"] = seconds(one_writes)
        with Fresh(target, rank):
            row["megatron_begin"] = seconds(megatron_begin)
            row["megatron_whole"] = row["megatron_begin"] + seconds(megatron_finish)
        times.append(row)
    left = torch.tensor(
        float(
            sum(child.memory_full_info().pss for child in psutil.Process().children(recursive=True))
        )
    )
    dist.all_reduce(left)
    elements = torch.tensor(float(sum(p.numel() for _, p in named_parameters(model))))
    if rank == 0:
        report.send(
            result_of(times, nbytes, float(elements), args) | {"left_mb": round(float(left) / 1e6)}
        )
    parallel_layout.leave()


class Fresh:
    """An empty folder for all ranks, removed afterwards."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def __enter__(self) -> None:
        if self._rank == 0:
            self._folder.mkdir()
        dist.barrier()

    def __exit__(self, *error: object) -> None:
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(self._folder)


def result_of(
    times: list[dict[str, float]], nbytes: int, elements: float, args: argparse.Namespace
) -> dict:
    """Medians over the repeats, without the first turn, which warms up; ratios turn by turn.

    Args:
        nbytes: of the checkpoint's files.
        elements: of this rank's parameters; tensor-parallel ranks hold as many, and norms besides,
            which are few.
    """
    first, *times = times
    ratios = [row["begin"] / row["waited"] for row in times]
    copy = 4 * elements * PARALLEL.tensor
    return {
        "machine": machine(),
        "settings": {
            name: value for name, value in vars(args).items() if name not in ("out", "folder")
        },
        "layout": "TP2 x DP2, gloo, distributed optimizer",
        "parameters_gb": round(copy / 1e9, 3),
        "folder_gb": round(nbytes / 1e9, 3),
        "folder_of_one_copy": round(nbytes / (3 * copy), 4),
        "seconds": {
            name: round(statistics.median(row[name] for row in times), 2) for name in times[0]
        },
        "first": {name: round(value, 2) for name, value in first.items()},
        "of_megatrons": {
            name: [round(row[name] / row[f"megatron_{name}"], 3) for row in times]
            for name in ("begin", "whole")
        },
        "waited_of_one_writes": [round(row["waited"] / row["one_writes"], 3) for row in times],
        "begin_of_waited": [round(ratio, 3) for ratio in ratios],
        "begin_of_waited_median": round(statistics.median(ratios), 3),
        "target": TARGET,
    }


if __name__ == "__main__":
    main()
