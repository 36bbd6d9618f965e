"""Writes the data of one training step under Hugging Face names, so that anyone can recompute the
step with the library `transformers` and without Megatron."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.config.schema import Config
from megatron_stare.records.rollout_batch import RolloutBatch


def write_tensors(
    folder: Path, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> None:
    """Writes weights.safetensors and gradients.safetensors.

    Args:
        weights: weights before the step.
        gradients: gradients of the loss over the whole batch, before clipping.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "weights.safetensors")
    save_file(
        {name: g.to(torch.float32) for name, g in gradients.items()},
        folder / "gradients.safetensors",
    )


def write_batch(
    folder: Path, batch: RolloutBatch, more: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Writes batch.safetensors.

    Args:
        batch: batch with advantages. Columns keep their names, except that `loss_mask` is written
            as `sampled`. Weight versions are written for each response position. `experts` is
            included if the batch has this column. `branch_samples`, `branch_contexts` and
            `branch_responses` (rollout_batch.Branches) are included if a response has several
            branches.
        more: further columns, by name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    assert batch.advantages is not None
    columns = {
        "tokens": batch.tokens.to(torch.int64),
        "sampled": batch.loss_mask,
        "weight_versions": batch.weight_versions,
    }
    as_they_are = (
        "rollout_log_probs",
        "prompt_lengths",
        "response_lengths",
        "groups",
        "rewards",
        "verified",
        "truncated",
    )
    columns |= {name: getattr(batch, name) for name in (*as_they_are, "advantages")}
    if batch.experts is not None:
        columns["experts"] = batch.experts
    if (branches := batch.branched) is not None:
        columns |= {f"branch_{f.name}": getattr(branches, f.name) for f in fields(branches)}
    columns |= more
    save_file(
        {name: column.contiguous() for name, column in columns.items()},
        folder / "batch.safetensors",
    )


def write_step(folder: Path, loss: float, config: Config) -> None:
    """Writes step.json.

    Args:
        loss: the scalar whose gradient was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step = {
        "loss": loss,
        "algorithm": config.algorithm.settings(),
        "temperature": config.rollout.temperature,
        "model": config.model.path,
    }
    (folder / "step.json").write_text(json.dumps(step, indent=2))
