"""Parameters, gradients and optimizer state off the device and back: the memory that frees there,
how fast it goes, and that every value is what it was."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from rig import Size, model_folder, now, random_batch
from verdict import Bound

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.optimizer.offload import PARTS
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import cost_of
from megatron_stare.ops.plan import PlanRules, plan_mini_batches
from megatron_stare.process.memory import device_used_bytes

GPU_ONLY = ("torch's memory while away over before", "device memory freed over that of the parts")
BOUNDS: dict[str, Bound] = {
    "values after coming back, tensors that differ": ("<=", 0.0),
    "bytes of the parts while away": ("<=", 0.0),
    "torch's memory while away over before": ("<=", 0.05),
    "device memory freed over that of the parts": (">=", 0.9),
}


def run(cpu: bool) -> dict[str, Any]:
    size = Size.of(cpu)
    with model_folder(size) as folder, tempfile.TemporaryDirectory() as scratch:
        config = Config.model_validate(
            {
                "model": {"path": folder, "dtype": "bfloat16"},
                "algorithm": {"name": "grpo"},
                "batch": {
                    "prompts": size.samples // 2,
                    "samples_per_prompt": 2,
                    "micro_batch_tokens": size.budget,
                },
                "optimizer": {"lr": 1e-3, "distributed": True},
            }
        )
        trainer = Trainer(resolve_run(config), 0, f"file://{scratch}/ranks")
        try:
            _step(trainer, size)
            found = _moved(trainer)  # pins the host's memory
            found |= {
                f"{name}, again": x for name, x in _moved(trainer).items() if name.startswith("GB")
            }
            _step(trainer, size)
        finally:
            trainer.close()
    return {"figures": found}


def _step(trainer: Trainer, size: Size) -> None:
    batch = random_batch(size)
    rules = PlanRules(1, size.budget, packed=True, cost=cost_of(trainer.policy.shape))
    plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), rules)
    trainer.compute_log_probs(batch.share(plan.branches_of(0)), plan)
    trainer.measure(trainer.method.initial_state())
    trainer.update(0)


def _moved(trainer: Trainer) -> dict[str, float]:
    """Moves the trainer's parts out and back once, and returns the figures."""
    storages = [one for part in trainer.memory.storages().values() for one in part]
    nbytes = sum(one.nbytes() for one in storages)
    tensors = [*_kept(trainer)]
    before = [tensor.detach().cpu().clone() for tensor in tensors]
    allocated, used = _allocated(), device_used_bytes()
    start = now()
    trainer.offload(PARTS)
    out = now() - start
    left, freed = sum(one.nbytes() for one in storages), (used or 0) - (device_used_bytes() or 0)
    away = _allocated()
    start = now()
    trainer.onload(PARTS)
    back = now() - start
    pairs = zip(before, tensors, strict=True)
    found = {
        "values after coming back, tensors that differ": float(
            sum(not torch.equal(a, b.cpu()) for a, b in pairs)
        ),
        "bytes of the parts while away": float(left),
        "GB of the parts": nbytes / 1e9,
        "GB a second out": nbytes / 1e9 / out,
        "GB a second back": nbytes / 1e9 / back,
    }
    if torch.cuda.is_available():
        found["torch's memory while away over before"] = away / allocated
        found["device memory freed over that of the parts"] = freed / nbytes
    return found


def _kept(trainer: Trainer) -> list[torch.Tensor]:
    """Parameters, main parameters and moments."""
    optimizer = trainer.policy.optimizer
    found = [parameter for chunk in trainer.policy.model for parameter in chunk.parameters()]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        found += [one for group in part.optimizer.param_groups for one in group["params"]]
        found += [
            x
            for state in part.optimizer.state.values()
            for x in state.values()
            if torch.is_tensor(x)
        ]
    return found


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
