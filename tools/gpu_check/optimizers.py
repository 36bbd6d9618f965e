"""The optimizer's settings of `performance`, each alone against none of them: what some updates
make of the float32 masters, the same after save and resume, and seconds and memory beside it.
Memory has the bound, not time: all of these settings save memory, and may cost time.

Gradients are drawn from the number of the step, so that nothing but the optimizer is compared. A
setting whose needs are not there is `not run`, by its name, and proves nothing.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clock import now
from megatron.core.optimizer import MegatronOptimizer
from rig import Size, model_folder
from torch import Tensor
from verdict import Bound

from megatron_stare.config.performance import FEATURES, missing
from megatron_stare.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
)
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.model.model import build_policy, load_hf, named_parameters
from megatron_stare.megatron.optimizer.distributed_optimizer import read_master
from megatron_stare.megatron.optimizer.optimizer import build_optimizer, take_step
from megatron_stare.megatron.optimizer.optimizer_state import chain
from megatron_stare.models import read_shape
from megatron_stare.weights.files.hf_folder import HfFolder

GPU_ONLY = ("settings that were run",)
# apart: of what the updates move a number at most; another kernel rounds otherwise
APART = 1e-3
BOUNDS: dict[str, Bound] = {
    "settings that were run": (">=", 1.0),
    "settings that failed": ("<=", 0.0),
}
STEPS, SAVED = 4, 2


@dataclass
class Updated:
    """Float32 masters and weights: before the updates, after them, and after them with a save and a
    resume on the way.
    seconds: of the quickest update. nbytes: of device memory at most, 0 on a CPU."""

    start: list[Tensor]
    end: list[Tensor]
    resumed: list[Tensor]
    seconds: float
    nbytes: int


def run(cpu: bool) -> dict[str, Any]:
    size, found = Size.of(cpu), {}
    with model_folder(size) as folder:
        plain = updated(folder, PerformanceConfig())
        for feature in FEATURES:
            if feature.check != "optimizers":
                continue
            if lacking := missing(feature):
                found[feature.name] = {"verdict": f"not run: {', '.join(lacking)} missing"}
                continue
            one = updated(folder, PerformanceConfig(**{feature.name: True}))  # type: ignore[arg-type]
            found[feature.name] = compared(one, plain)
    ran = [each for each in found.values() if not each["verdict"].startswith("not run")]
    return {
        "figures": {
            "settings that were run": float(len(ran)),
            "settings that failed": float(sum(each["verdict"] == "fail" for each in ran)),
        },
        "settings": found,
    }


def compared(one: Updated, plain: Updated) -> dict[str, Any]:
    """Figures of a setting, with its verdict: right, the same when resumed, and on a GPU with less
    memory."""
    moved = max(
        float((end - start).abs().max()) for end, start in zip(plain.end, plain.start, strict=True)
    )
    apart = (
        max(float((end - other).abs().max()) for end, other in zip(one.end, plain.end, strict=True))
        / moved
    )
    changed = sum(
        not torch.equal(end, other) for end, other in zip(one.end, one.resumed, strict=True)
    )
    saves = one.nbytes < plain.nbytes or plain.nbytes == 0
    good = apart <= APART and changed == 0 and saves
    return {
        "verdict": "pass" if good else "fail",
        "largest difference over what the updates move": apart,
        "tensors that a resume changes": changed,
        "time over none": one.seconds / plain.seconds,
        "memory over none": one.nbytes / max(plain.nbytes, 1),
    }


def updated(folder: str, performance: PerformanceConfig) -> Updated:
    """Some updates of a bfloat16 policy on one rank with the distributed optimizer."""
    parallel, shape = ParallelConfig(), read_shape(folder)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        layout = parallel_layout.join(parallel, 0, f"file://{scratch}/ranks", seed=1, timeout_s=120)
        try:
            results, seconds, saved = [], [], Path(scratch) / "checkpoint"
            saved.mkdir()
            for resumed in (False, True):
                model = build_policy(
                    shape,
                    ModelConfig(path=folder, dtype="bfloat16"),
                    parallel,
                    layout,
                    True,
                    performance,
                )
                load_hf(model, HfFolder(folder), shape, layout)
                config = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=1.0, distributed=True)
                optimizer, scheduler = build_optimizer(
                    model, config, "bfloat16", STEPS, performance
                )
                state = (model, optimizer, scheduler, layout)
                if resumed:
                    checkpoint.load(str(saved), *state)
                results.append(_masters(optimizer))
                for number in range(SAVED if resumed else 0, STEPS):
                    if number == SAVED and not resumed:
                        checkpoint.save(str(saved), *state)
                    noise = torch.Generator().manual_seed(number)
                    for _, parameter in named_parameters(model):
                        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=noise))
                    start = now()
                    assert take_step(
                        optimizer, scheduler, config.clip_grad, empty=None, loss_not_finite=None
                    ).taken
                    seconds.append(now() - start)
                results.append(_masters(optimizer))
            peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            return Updated(results[0], results[1], results[3], min(seconds), peak)
        finally:
            parallel_layout.leave()


def _masters(optimizer: MegatronOptimizer) -> list[Tensor]:
    """On the host."""
    inner = chain(optimizer)[0].optimizer
    ones = [one for group in inner.param_groups for one in group["params"]]
    return [read_master(one, inner.state.get(one, {})).float().cpu().clone() for one in ones]
