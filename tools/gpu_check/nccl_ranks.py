"""Several NCCL ranks on one GPU (NCCL_MULTI_RANK_GPU_ENABLE, NCCL 2.30 or newer): layouts against
transformers, and batched point-to-point against unbatched. Over gloo on a CPU, with two ranks and
without batches."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from clock import exact_products, repeatable
from rig import Passed, Size, expected, gradient_error, model_folder, trained
from torch import Tensor
from verdict import Bound

from megatron_stare.config.schema import ParallelConfig, PerformanceConfig

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor 2, sequence, pipeline 2": {"tensor": 2, "sequence": True, "pipeline": 2},
    "pipeline 2, data 2": {"pipeline": 2, "data": 2},
    "pipeline 4": {"pipeline": 4},
}
SMALL: dict[str, dict[str, Any]] = {"pipeline 2": {"pipeline": 2}}
GPU_ONLY = (
    *(f"{name}: gradient" for name in LAYOUTS),
    "pipeline 4, batched: gradient, difference from unbatched",
)
BOUNDS: dict[str, Bound] = {
    **{f"{name}: gradient": ("<=", 1e-4) for name in LAYOUTS},
    "log-prob, largest difference (nats)": ("<=", 1e-4),
    "gradient, largest difference": ("<=", 1e-4),
    "pipeline 4, batched: gradient, difference from unbatched": ("<=", 1e-6),
}


def run(cpu: bool) -> dict[str, Any]:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    size, figures, gradients = Size.of(cpu), {}, {}
    with model_folder(size) as folder:
        exact_products()
        log_prob, wanted = expected(folder, size)
        largest = 0.0
        for name, layout in (SMALL if cpu else LAYOUTS).items():
            ranks = _ranks(folder, size, layout, batched=False)
            gradients[name] = merged(ranks)
            figures[f"{name}: gradient"] = gradient_error(gradients[name], wanted)
            largest = max([largest, *(_apart(rank, log_prob) for rank in ranks)])
        if not cpu:
            batched = merged(_ranks(folder, size, LAYOUTS["pipeline 4"], batched=True))
            error = gradient_error(batched, gradients["pipeline 4"])
            figures["pipeline 4, batched: gradient, difference from unbatched"] = error
    figures["log-prob, largest difference (nats)"] = largest
    figures["gradient, largest difference"] = max(
        figures[f"{name}: gradient"] for name in gradients
    )
    return {"figures": figures}


def _ranks(folder: str, size: Size, layout: dict[str, Any], *, batched: bool) -> list[Passed]:
    world = ParallelConfig(**layout).world_size
    with (
        tempfile.TemporaryDirectory() as meeting,
        multiprocessing.get_context("spawn").Pool(world) as pool,
    ):
        jobs = [
            (rank, f"file://{meeting}/ranks", folder, size, layout, batched)
            for rank in range(world)
        ]
        return pool.starmap_async(_rank, jobs, chunksize=1).get(timeout=400)


def _rank(
    rank: int, init: str, folder: str, size: Size, layout: dict[str, Any], batched: bool
) -> Passed:
    exact_products()
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    performance = PerformanceConfig(batched_p2p=True) if batched else PerformanceConfig()
    parallel = ParallelConfig(**layout)
    with repeatable():  # batched and not are held together to 1e-6
        return trained(
            folder, size, parallel=parallel, rank=rank, init=init, performance=performance
        )


def merged(ranks: list[Passed]) -> dict[str, Tensor]:
    """The gradients of all ranks by name."""
    return {name: each for rank in ranks for name, each in rank.gradients.items()}


def _apart(rank: Passed, wanted: Tensor) -> float:
    return float((rank.log_prob - wanted[rank.index]).abs().max()) if len(rank.index) else 0.0
