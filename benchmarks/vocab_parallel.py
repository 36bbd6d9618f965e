"""Log-prob and entropy over sharded logits: our bodies against what trainers do today. Time, extra
memory, error.

A cell is one shape, dtype, number of tensor-parallel ranks and task; in it every body and baseline
runs on the same tensors, one after the other. Extra memory is the largest resident memory of a rank
during the last call (on a GPU: allocated memory) less that before it; small buffers that the
allocator kept from the call before are not in it. Errors are the largest of 64 random rows against
float64. Cells are saved as they come, the tasks of a small shape together, and those that are there
already are left out.

    python benchmarks/vocab_parallel.py
        the grid of this machine
    python benchmarks/vocab_parallel.py --seconds 150
        no new cell after that time; call it again for the rest
    python benchmarks/vocab_parallel.py --huge-pages
        on a CPU, with an allocator that asks for huge pages; its results are a file of their own
    python benchmarks/vocab_parallel.py --table
        the table for the docs and its summary, from the saved cells
    TORCHDYNAMO_DISABLE=0 python benchmarks/vocab_parallel.py --only 1024/32768 \\
        --out benchmarks/results/NAME.json
        beside Megatron's fused cross entropy, compiled
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import psutil
import torch
import torch.distributed as dist
from machine import forget_peak, machine, process_memory
from torch import Tensor
from vocab_baselines import BASELINES

from megatron_stare.ops.vocab_parallel import log_prob_and_entropy

RESULTS = Path(__file__).parent / "results"
# forward alone; and backward of the log-prob; and of the entropy too
TASKS = ("forward", "metric", "gradient")
CHECKED_ROWS = 64
PATIENCE_S = 3.0  # of one body or baseline in one cell, after its first three runs
MOST_RUNS = 7


@dataclass(frozen=True)
class Cell:
    device: str
    rows: int
    columns: int  # of the whole vocabulary
    dtype: str
    ranks: int
    task: str

    @property
    def name(self) -> str:
        return "/".join(str(each) for each in asdict(self).values())

    @property
    def bodies(self) -> list[str]:
        ours = ["triton", "chunked"] if self.device == "cuda" else ["chunked", "reference"]
        if self.device == "cpu" and self.rows > 4096:
            return ["chunked"]
        if self.device == "cpu" and self.is_large:
            # the plain body takes minutes, and is not what anything is measured against
            ours = ["chunked"]
        return [*ours, *BASELINES]

    @property
    def is_large(self) -> bool:
        return self.rows * self.columns > 2**28


def grid(cuda: bool) -> Iterator[Cell]:
    """The cells of this machine."""
    ranks = [1, 2]
    if cuda:
        ranks = [n for n in ranks if n <= torch.cuda.device_count()]
        shapes = [(n, v) for n in (1024, 4096, 8192, 32768) for v in (32768, 151936)]
    else:
        shapes = [(n, v) for n in (1024, 4096) for v in (32768, 151936)]
    for tp in ranks:
        for dtype in ("float32", "bfloat16"):
            for rows, columns in shapes:
                for task in TASKS:
                    yield Cell("cuda" if cuda else "cpu", rows, columns, dtype, tp, task)
    if not cuda:
        for task in TASKS:
            yield Cell("cpu", 32768, 32768, "bfloat16", 1, task)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument(
        "--only", default="", help="cells whose name contains this, for example bfloat16/1/"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of all ranks together"
    )
    parser.add_argument(
        "--huge-pages",
        action="store_true",
        help="what is written first time then costs a CPU little",
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="default: in results/, by device and kind of pages"
    )
    args = parser.parse_args()
    kind = "_gpu" if torch.cuda.is_available() else "_huge_pages" if args.huge_pages else ""
    args.out = args.out or RESULTS / f"vocab_parallel{kind}.json"
    saved: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {"cells": {}}
    if args.table:
        print(table(saved["cells"]), summary(saved["cells"]), sep="\n\n")
        return
    end = time.monotonic() + args.seconds
    if args.huge_pages:
        # read by torch's allocator, in the ranks' processes
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    saved |= {"machine": machine(), "threads": args.threads, "huge_pages": args.huge_pages}
    todo = [
        c
        for c in grid(torch.cuda.is_available())
        if c.name not in saved["cells"] and args.only in c.name
    ]
    for _, same in itertools.groupby(
        todo, lambda cell: cell if cell.is_large else replace(cell, task="")
    ):
        if time.monotonic() > end:
            print("time is up; call again for the rest")
            return
        cells = list(same)
        for cell, result in zip(cells, run_cells(cells, args.threads), strict=True):
            saved["cells"][cell.name] = result
            print(cell.name, json.dumps(result), flush=True)
        args.out.parent.mkdir(exist_ok=True)
        args.out.write_text(json.dumps(saved, indent=1) + "\n")


def run_cells(cells: list[Cell], threads: int) -> list[dict[str, Any]]:
    """Measures every body and baseline in cells that differ in their task alone."""
    ranks = cells[0].ranks
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (rank, f"file://{folder}/ranks", cells, max(threads // ranks, 1))
            for rank in range(ranks)
        ]
        with multiprocessing.get_context("spawn").Pool(ranks) as pool:
            return pool.starmap(measure, jobs, chunksize=1)[0]


def measure(rank: int, init: str, cells: list[Cell], threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    cell = cells[0]
    join(rank, init, cell)
    width = cell.columns // cell.ranks
    generator = torch.Generator(cell.device).manual_seed(rank)
    kept = torch.empty(cell.rows, width, dtype=getattr(torch, cell.dtype), device=cell.device)
    for rows in kept.split(256):
        rows.copy_(3 * torch.randn(rows.shape, generator=generator, device=cell.device))
    common = torch.Generator().manual_seed(10)
    targets = torch.randint(0, cell.columns, (cell.rows,), generator=common).to(cell.device)
    upstream = torch.randn(2, cell.rows, generator=common).to(cell.device)
    checked = torch.randperm(cell.rows, generator=common)[:CHECKED_ROWS].to(cell.device)
    results = [compare(each, kept, targets, upstream, checked) for each in cells]
    dist.destroy_process_group()
    return results


def compare(
    cell: Cell, kept: Tensor, targets: Tensor, upstream: Tensor, checked: Tensor
) -> dict[str, Any]:
    """One cell: every body and baseline on copies of the same logits."""
    group = dist.group.WORLD if cell.ranks > 1 else None
    truth = exact(kept[checked], targets[checked], upstream[:, checked], cell, group)
    logits = torch.empty_like(kept)
    results: dict[str, Any] = {}
    for body in cell.bodies:
        try:
            call = caller(body, logits, targets, upstream, cell, group)
            results[body] = one(call, logits, kept, checked, truth, cell)
        except NotImplementedError as error:
            results[body] = {"left_out": str(error)}
        except MemoryError as error:
            results[body] = {"does_not_fit": str(error)}
    if cell.device == "cuda":
        results["copy"] = copy_bandwidth(logits, kept)
    return results


def join(rank: int, init: str, cell: Cell) -> None:
    """Megatron's groups, which its cross entropy wants."""
    from megatron_stare.config.schema import ParallelConfig
    from megatron_stare.megatron.backend import layout

    if cell.device == "cuda":
        torch.cuda.set_device(rank)
    layout.join(ParallelConfig(tensor=cell.ranks), rank, init, seed=1, timeout_s=600)


def caller(
    body: str,
    logits: Tensor,
    targets: Tensor,
    upstream: Tensor,
    cell: Cell,
    group: dist.ProcessGroup | None,
) -> Callable[[], tuple[Tensor, ...]]:
    """One run: log-prob, entropy where there is one, and the gradient where the task asks for
    it."""
    backward, of_entropy = cell.task != "forward", cell.task == "gradient"

    def run() -> tuple[Tensor, ...]:
        leaf = logits.detach().requires_grad_(backward)
        if body in BASELINES:
            with torch.set_grad_enabled(backward):
                log_prob, entropy = BASELINES[body](leaf, targets, group, of_entropy)
            source = leaf
        else:
            # not a leaf, because it is written over
            source = leaf.view(leaf.shape) if backward else leaf
            log_prob, entropy = log_prob_and_entropy(
                source,
                targets,
                vocab_size=cell.columns,
                group=group,
                entropy_gradient=of_entropy,
                body=body,  # type: ignore[arg-type]
                overwrite_logits=backward,
            )
        outputs = (log_prob.detach(),) if entropy is None else (log_prob.detach(), entropy.detach())
        if not backward:
            return outputs
        of, by = ((log_prob, entropy), tuple(upstream)) if of_entropy else (log_prob, upstream[0])
        return (*outputs, *torch.autograd.grad(of, source, by))

    if body in BASELINES:
        copies = 5 * logits.numel() * 4  # float32 copies that the baselines keep at once, at most
        room = (
            psutil.virtual_memory().available / cell.ranks
            if cell.device == "cpu"
            else torch.cuda.mem_get_info()[0]
        )
        if copies > room:
            raise MemoryError(f"needs up to {copies / 1e9:.1f} GB, {room / 1e9:.1f} GB are free")
    return run


def one(
    call: Callable[[], tuple[Tensor, ...]],
    logits: Tensor,
    kept: Tensor,
    checked: Tensor,
    truth: list[Tensor],
    cell: Cell,
) -> dict[str, Any]:
    """Median and least seconds, extra megabytes, and errors of one body or baseline."""
    seconds: list[float] = []
    extra, errors, begin = 0.0, {}, time.monotonic()
    while len(seconds) < 3 or (time.monotonic() - begin < PATIENCE_S and len(seconds) <= MOST_RUNS):
        logits.copy_(kept)
        before = held(cell.device)
        synchronise(cell)
        start = time.perf_counter()
        outputs = call()
        synchronise(cell)
        seconds.append(time.perf_counter() - start)
        extra = (peak(cell.device) - before) / 1e6
        if not errors:
            names = ["log_prob", "entropy"][: len(outputs) - (cell.task != "forward")]
            names += ["gradient"] if cell.task != "forward" else []
            wanted = dict(zip(["log_prob", "entropy", "gradient"], truth, strict=False))
            for name, got in zip(names, outputs, strict=True):
                errors[name] = float((got.detach()[checked].double() - wanted[name]).abs().max())
        del outputs
        enough = torch.tensor(float(time.monotonic() - begin))
        if cell.ranks > 1:  # all ranks stop together
            dist.all_reduce(enough.to(cell.device), dist.ReduceOp.MAX)
            begin = time.monotonic() - float(enough)
    timed = slowest(seconds[1:], cell)  # the first warms up
    return {
        "seconds": round(statistics.median(timed), 5),
        "least_seconds": round(min(timed), 5),
        "runs": len(timed),
        "extra_mb": round(extra, 1),
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
    }


def slowest(seconds: list[float], cell: Cell) -> list[float]:
    """Takes the time of the slowest rank for every run."""
    times = torch.tensor(seconds, dtype=torch.float64, device=cell.device)
    if cell.ranks > 1:
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def exact(
    logits: Tensor, targets: Tensor, upstream: Tensor, cell: Cell, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """In float64: log-prob, entropy and this rank's columns of the gradient, of the checked
    rows."""
    parts = [logits]
    if group is not None:
        parts = [torch.empty_like(logits) for _ in range(cell.ranks)]
        dist.all_gather(parts, logits.contiguous(), group=group)
    whole = torch.cat(parts, dim=1).double().requires_grad_()
    log_p = whole.log_softmax(1)
    log_prob = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(1)
    loss = log_prob @ upstream[0].double()
    if cell.task == "gradient":
        loss = loss + entropy @ upstream[1].double()
    (gradient,) = torch.autograd.grad(loss, whole)
    mine = gradient.chunk(cell.ranks, dim=1)[dist.get_rank()]
    return [log_prob.detach(), entropy.detach(), mine]


def held(device: str) -> float:
    """Bytes held now, from where `peak` is counted."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    forget_peak()
    return process_memory("VmRSS")


def peak(device: str) -> float:
    """The most bytes held since `held`."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else process_memory("VmHWM")


def synchronise(cell: Cell) -> None:
    if cell.device == "cuda":
        torch.cuda.synchronize()
    if cell.ranks > 1:
        dist.barrier()


def copy_bandwidth(out: Tensor, source: Tensor) -> dict[str, float]:
    """Bytes read and written a second by the device's own copy."""
    taken = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out.copy_(source)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return {"bytes_per_s": 2 * source.nbytes / statistics.median(taken)}


def table(cells: dict[str, Any]) -> str:
    """Markdown: a line a cell, our first body against the baselines."""
    lines = [
        (
            "| N x V | dtype | TP | task | ours s | extra MB | float32 s | extra MB | ratio |"
            " cross_entropy s | megatron s | largest error, ours / float32 |"
        ),
        "|" + " --- |" * 12,
    ]
    for name in sorted(cells, key=order):
        cell = cells[name]
        _, rows, columns, dtype, ranks, task = name.split("/")
        ours = next(iter(cell.values()))
        theirs = cell.get("float32", {})
        ratio = f"{ours['seconds'] / theirs['seconds']:.2f}" if "seconds" in theirs else ""
        errors = " / ".join(
            f"{max(x['errors'].values()):.1e}" for x in (ours, theirs) if "errors" in x
        )
        cross, core = (shown(cell, each) for each in ("cross_entropy", "megatron"))
        lines.append(
            f"| {int(rows):,} x {int(columns):,} | {dtype} | {ranks} | {task} |"
            f" {ours['seconds']:.3f} | {max(ours['extra_mb'], 0):.0f} | {shown(cell, 'float32')} |"
            f" {theirs.get('extra_mb', '')} | {ratio} | {cross} | {core} | {errors} |"
        )
    return "\n".join(lines)


def order(name: str) -> tuple[Any, ...]:
    """Sort key of a cell in the table: device, ranks and dtype, then shape and task."""
    device, rows, columns, dtype, ranks, task = name.split("/")
    return device, int(ranks), dtype != "float32", int(rows), int(columns), TASKS.index(task)


def summary(cells: dict[str, Any]) -> str:
    """Summary of the cells that stand beside the float32 formulation. Listed are the range of each
    task's ratios, the largest share of the formulation's extra memory, and every output whose error
    is larger than the formulation's."""
    pairs = {
        name: (next(iter(cell.values())), cell["float32"])
        for name, cell in cells.items()
        if "float32" in cell
    }
    pairs = {name: pair for name, pair in pairs.items() if "seconds" in pair[1]}
    lines = [f"{len(cells)} cells, {len(pairs)} beside the float32 formulation"]
    for task in TASKS:
        ratios = [
            ours["seconds"] / theirs["seconds"]
            for name, (ours, theirs) in pairs.items()
            if name.endswith(task)
        ]
        lines.append(f"{task}: {min(ratios):.2f} to {max(ratios):.2f} of its time")
    memory = max(ours["extra_mb"] / theirs["extra_mb"] for ours, theirs in pairs.values())
    lines.append(f"at most {memory:.4f} of its extra memory")
    for name, (ours, theirs) in pairs.items():
        for output, error in ours["errors"].items():
            if error > theirs["errors"][output]:
                lines.append(
                    f"larger error: {name} {output} {error:.3g}, float32's"
                    f" {theirs['errors'][output]:.3g}"
                )
    return "\n".join(lines)


def shown(cell: dict[str, Any], body: str) -> str:
    """Seconds, or why there are none."""
    result = cell.get(body, {"left_out": ""})
    if "seconds" in result:
        return f"{result['seconds']:.3f}"
    return "does not fit" if "does_not_fit" in result else result["left_out"]


if __name__ == "__main__":
    main()
