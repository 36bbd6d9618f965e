"""Ranks of a layout in processes of their own, and the random model that they are measured with."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_stare.models.shape import ModelShape


def measured(
    one_rank: Callable[..., None], world: int, args: argparse.Namespace, where: Path | None = None
) -> None:
    """Runs one_rank(rank, folder, args, report) on every rank; what one of them reports is printed,
    and kept in `args.out`.

    Args:
        where: the disk that the folder is on; default: that of temporary files.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(dir=where) as folder:
        jobs = [(rank, Path(folder), args, there) for rank in range(world)]
        processes = [context.Process(target=one_rank, args=job) for job in jobs]
        for process in processes:
            process.start()
        there.close()
        result: dict[str, Any] = here.recv()  # EOFError if a rank fell
        for process in processes:
            process.join()
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def seconds(way: Callable[[], Any]) -> float:
    """Wall clock from when all ranks are ready until all are done."""
    dist.barrier()
    start = time.perf_counter()
    way()
    dist.barrier()
    return time.perf_counter() - start


def shape_of(args: argparse.Namespace) -> ModelShape:
    """A Qwen2 of the size that was asked for."""
    return ModelShape(
        family="qwen2",
        layers=args.layers,
        hidden=args.hidden,
        heads=args.hidden // 64,
        kv_heads=2,
        head_dim=64,
        ffn=args.hidden * 8 // 3,
        vocab_size=args.vocab,
        max_positions=1024,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        tied=False,
        qkv_bias=True,
        qk_norm=False,
    )
