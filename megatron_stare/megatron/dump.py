"""Writes one training step in Hugging Face names, so that anyone can recompute it with plain transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.batch import RolloutBatch
from megatron_stare.config.schema import Config


def write_tensors(folder: Path, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Writes weights.safetensors and gradients.safetensors.

    Args:
        weights: before the step.
        gradients: of the loss over the whole batch, before clipping.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "weights.safetensors")
    save_file({name: g.to(torch.float32) for name, g in gradients.items()}, folder / "gradients.safetensors")


def write_step(folder: Path, batch: RolloutBatch, loss: float, config: Config) -> None:
    """Writes batch.safetensors and step.json.

    Args:
        batch: with advantages; its fields become tensors of the same names (see RolloutBatch).
        loss: the scalar whose gradient was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    save_file({name: value.contiguous() for name, value in fields.items()}, folder / "batch.safetensors")
    step = {
        "loss": loss,
        "algorithm": config.algorithm,
        "temperature": config.rollout.temperature,
        "model": config.model.path,
    }
    (folder / "step.json").write_text(json.dumps(step, indent=2))
