"""Dumps by `--dump-step` hold the gradients of the whole batch, where gradients are sharded over
data ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import log_prob_pass

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.step.dump import write_tensors
from megatron_stare.megatron.trainer import Trainer

pytestmark = pytest.mark.distributed
SEED, SIZE = 8, 8


def dump(
    rank: int, init: str, config: Config, folder: str
) -> tuple[dict[str, float] | None, dict[str, torch.Tensor]]:
    """Takes a step that is dumped; returned are its report and the weights after it."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch = random_batch(SEED, SIZE)
    log_prob_pass(trainer, batch)
    trainer.measure(trainer.method.initial_state())
    result = trainer.update(0, folder)
    weights = trainer.export()
    trainer.close()
    return (result[0] if result else None), weights


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_tied", {"data": 2}),
        ("qwen2_tied", {"tensor": 2, "data": 2}),
        ("qwen3_moe", {"data": 4, "expert": 2}),
    ],
    ids=["dp2", "tp2-dp2", "dp4-ep2"],
)
def test_the_distributed_optimizer_dumps_whole_gradients(
    ranks: RankPool, tmp_path: Path, family: str, layout: dict[str, int]
) -> None:
    save_model(tmp_path / "model", family)
    found: list[dict[str, torch.Tensor]] = []
    for distributed in (False, True):
        tree: dict[str, Any] = {
            "model": {"path": str(tmp_path / "model")},
            "parallel": layout,
            "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 24},
            "algorithm": {"name": "grpo"},
            "optimizer": {"lr": 1e-2, "clip_grad": 0.01, "distributed": distributed},
        }
        config, folder = Config.model_validate(tree), tmp_path / str(distributed)
        results = ranks.run(dump, config.parallel.world_size, config, str(folder))
        (metrics,) = [metrics for metrics, _ in results if metrics]
        gradients = load_file(folder / "gradients.safetensors")
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).double().norm()
        assert float(norm) == pytest.approx(metrics["optimizer/grad_norm"], rel=1e-5)
        found += [gradients, {name: weight for _, part in results for name, weight in part.items()}]
    plain, weights, sharded, sharded_weights = found
    assert sharded.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(sharded[name], gradient, atol=1e-6, rtol=1e-5, msg=name)
    for name, weight in weights.items():  # the dump changes nothing of the step
        torch.testing.assert_close(sharded_weights[name], weight, atol=1e-5, rtol=1e-5, msg=name)


def test_a_folder_may_be_there_already(tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        write_tensors(
            tmp_path / "new/dump",
            {"a": torch.tensor([number])},
            {"a": torch.tensor([0.5]).bfloat16()},
        )
    assert load_file(tmp_path / "new/dump/weights.safetensors")["a"].tolist() == [2.0]
    assert load_file(tmp_path / "new/dump/gradients.safetensors")["a"].dtype == torch.float32
