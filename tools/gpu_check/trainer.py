"""The trainer against plain transformers on one device: float32 exactly, bfloat16 within its
rounding, recomputed the same, saved and continued to the same weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from clock import exact_products, repeatable
from rig import Size, expected, gradient_error, model_folder, random_batch, trained
from verdict import Bound

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.models import cost_of
from megatron_stare.ops.plan import PlanRules, plan_mini_batches

GPU_ONLY: tuple[str, ...] = ()
BOUNDS: dict[str, Bound] = {
    "float32 log-prob, largest difference (nats)": ("<=", 1e-4),
    "float32 gradient, largest difference": ("<=", 1e-4),
    "float32 gradient recomputed, largest difference": ("<=", 1e-5),
    # against float32, relative to transformers' own bfloat16: a rounding apart, not a mistake
    "bfloat16 gradient's error over transformers' in bfloat16": ("<=", 2.0),
    "weights after save and resume, tensors that differ": ("<=", 0.0),
}


def run(cpu: bool) -> dict[str, Any]:
    exact_products()
    size = Size.of(cpu)
    with model_folder(size) as folder:
        log_prob, gradients = expected(folder, size)
        plain = trained(folder, size)
        again = trained(folder, size, recompute="full")
        rounded = trained(folder, size, dtype="bfloat16")
        _, theirs = expected(folder, size, "bfloat16")
        error = gradient_error(rounded.gradients, gradients), gradient_error(theirs, gradients)
        figures = {
            "float32 log-prob, largest difference (nats)": float(
                (plain.log_prob - log_prob[plain.index]).abs().max()
            ),
            "float32 gradient, largest difference": gradient_error(plain.gradients, gradients),
            "float32 gradient recomputed, largest difference": gradient_error(
                again.gradients, plain.gradients
            ),
            "bfloat16 gradient's error over transformers' in bfloat16": error[0] / error[1],
            "bfloat16 gradient, largest difference": error[0],
            "weights after save and resume, tensors that differ": resumed(folder, size),
        }
    return {"figures": figures, "seconds": {"float32": plain.seconds, "recomputed": again.seconds}}


def resumed(folder: str, size: Size) -> float:
    """How many tensors differ after two steps straight and after one step, a checkpoint and another
    step."""
    config = Config.model_validate(
        {
            "run": {"steps": 2},
            "model": {"path": folder},
            "algorithm": {"name": "grpo"},
            "batch": {
                "prompts": size.samples // 2,
                "samples_per_prompt": 2,
                "micro_batch_tokens": size.budget,
            },
            "optimizer": {"lr": 1e-3},
        }
    )
    with repeatable(), tempfile.TemporaryDirectory() as scratch:
        straight = _stepped(config, size, scratch, (None, "save"), 2)
        torch.manual_seed(99)  # what a process of its own would start with
        after = _stepped(config, size, scratch, ("load", None), 1)
    return float(sum(not torch.equal(straight[name], each) for name, each in after.items()))


def _stepped(
    config: Config, size: Size, scratch: str, at: tuple[str | None, str | None], steps: int
) -> dict[str, torch.Tensor]:
    """The weights after so many steps; loaded before, or saved after the first."""
    checkpoint, meeting = Path(scratch) / "checkpoint", Path(scratch) / f"ranks-{at[0]}"
    run = resolve_run(config)
    trainer = Trainer(run, 0, f"file://{meeting}")
    try:
        if at[0]:
            trainer.load(str(checkpoint))
        for step in range(steps):
            batch = random_batch(size)
            rules = PlanRules(1, size.budget, packed=True, cost=cost_of(run.shape))
            plan = plan_mini_batches(batch.lengths.tolist(), batch.groups.tolist(), rules)
            trainer.compute_log_probs(batch.share(plan.branches_of(0)), plan)
            trainer.measure(trainer.method.initial_state())
            trainer.update(0)
            if at[1] and step == 0:
                checkpoint.mkdir()
                trainer.save(str(checkpoint))
                trainer.finish_save()
        return {name: each.cpu().clone() for name, each in trainer.export().items()}
    finally:
        trainer.close()
