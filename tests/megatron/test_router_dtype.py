"""The router of a model in 16 bits computes in the dtype that was asked for, and so does that of
the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import take_step

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.cpu_backend import backend
from megatron_stare.megatron.model.model import unwrap
from megatron_stare.megatron.trainer import UNREPLAYED, Trainer


def errors_of(
    rank: int, init: str, config: Config
) -> tuple[list[float], list[torch.dtype], float, list[str]]:
    """How far the logits of policy and reference lie from those of exact arithmetic, relative to
    the largest; the dtypes of logits and of a layer's output; the gradient norm of a step; what the
    person is told at the start."""
    trainer = Trainer(resolve_run(config), rank, init)
    rows, _ = take_step(trainer, random_batch(1, size=8))
    assert trainer.policy.reference is not None
    hidden = torch.randn(64, 1, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    errors, dtypes = [], []
    for (chunk,) in (trainer.policy.model, trainer.policy.reference.model):
        layer = unwrap(chunk).decoder.layers[0].mlp
        with backend(), torch.no_grad():
            logits, output = layer.router.gating(hidden), layer(hidden)[0]
        exact = hidden.double() @ layer.router.weight.double().T
        errors.append(float((logits.double() - exact).abs().max() / exact.abs().max()))
        dtypes += [logits.dtype, output.dtype]
    notes = trainer.notes()
    trainer.close()
    return errors, dtypes, rows[0]["optimizer/grad_norm"], notes


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("asked", "dtype", "least", "most"),
    [
        ("model", torch.bfloat16, 1e-3, 1e-2),
        ("float32", torch.float32, 1e-9, 1e-6),
        ("float64", torch.float64, 0.0, 1e-15),
    ],
)
def test_logits_are_as_exact_as_was_asked(
    ranks: RankPool, tmp_path: Path, asked: str, dtype: torch.dtype, least: float, most: float
) -> None:
    save_model(tmp_path, "qwen3_moe")
    tree: dict[str, Any] = {
        "model": {"path": str(tmp_path), "dtype": "bfloat16"},
        "moe": {"router_dtype": asked},
    }
    config = Config.model_validate(
        {**tree, "algorithm": {"name": "grpo", "reference_kl": {"coef": 0.1}}}
    )
    ((errors, dtypes, norm, notes),) = ranks.run(errors_of, 1, config)
    assert all(least <= error <= most for error in errors)
    assert dtypes == [dtype, torch.bfloat16] * 2
    assert 0 < norm < float("inf")
    assert UNREPLAYED in notes
