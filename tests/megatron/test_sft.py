"""Supervised fine-tuning through Megatron: loss and gradients are those of transformers, whose
labels are -100 where a token carries no loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import save_model
from support.ranks import RankPool
from support.steps import log_prob_pass
from test_parity import as_saved
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.driver.demonstrations import batch_of
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.records.batch import Demonstration
from megatron_stare.records.rollout_batch import RolloutBatch

pytestmark = pytest.mark.distributed
VOCAB, ROWS = 37, 6


def rows() -> list[Demonstration]:
    """Rows of unequal length; in most of them a turn of somebody else lies within the response."""
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, n: int) -> tuple[int, ...]:
        return tuple(torch.randint(low, high, (n,), generator=generator).tolist())

    found = []
    for cursor in range(ROWS):
        n = 5 + 2 * cursor
        mask = tuple(position not in range(2, 2 + cursor) for position in range(n))
        ids, response = draw(2, VOCAB, 2 + cursor % 3), draw(2, VOCAB, n)
        found.append(Demonstration(cursor, str(cursor), "", "", ids, "", None, response, mask))
    return found


def config_of(path: Path, layout: dict[str, Any], packed: bool, **more: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "parallel": layout,
            "batch": {
                "prompts": ROWS,
                "samples_per_prompt": 1,
                "micro_batch_tokens": 40,
                "packed": packed,
            },
            "algorithm": {"name": "sft"},
            "data": {"source": "messages"},
            "optimizer": {"clip_grad": 0.01},
            **more,
        }
    )


def step(rank: int, init: str, config: Config, folder: str) -> dict[str, float] | None:
    trainer = Trainer(resolve_run(config), rank, init)
    batch: RolloutBatch = trainer.method.judge(batch_of(rows(), 1))
    log_prob_pass(trainer, batch)
    trainer.measure({})
    result = trainer.update(0, folder)
    trainer.close()
    return result[0] if result else None


def truth(path: Path) -> tuple[float, dict[str, Tensor]]:
    """transformers' loss over all rows together, and its gradients."""
    whole = [(*row.token_ids, *row.response) for row in rows()]
    longest = max(map(len, whole))
    ids = torch.tensor([(*each, *[0] * (longest - len(each))) for each in whole])
    labels = torch.full_like(ids, -100)
    for number, row in enumerate(rows()):
        for at, learnt in enumerate(row.loss_mask, len(row.token_ids)):
            if learnt:
                labels[number, at] = ids[number, at]
    there = torch.tensor([[at < len(each) for at in range(longest)] for each in whole])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loss = model(input_ids=ids, attention_mask=there.long(), labels=labels).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss), as_saved(gradients)


def check(ranks: RankPool, tmp_path: Path, family: str, layout: dict[str, Any], packed: bool):
    save_model(tmp_path / "model", family)
    loss, wanted = truth(tmp_path / "model")
    config = config_of(tmp_path / "model", layout, packed)
    results = ranks.run(step, config.parallel.world_size, config, str(tmp_path / "dump"))
    (metrics,) = filter(None, results)
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-6)
    assert metrics["loss/tokens"] == sum(sum(row.loss_mask) for row in rows())
    assert not any(name.startswith("rollout/") for name in metrics)
    gradients = load_file(tmp_path / "dump/gradients.safetensors")
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        bound = 1e-5 * wanted[name].abs().max() + 1e-7
        assert (gradient - wanted[name]).abs().max() <= bound, name


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_loss_and_gradients_of_transformers(ranks, tmp_path: Path, packed: bool) -> None:
    check(ranks, tmp_path, "qwen2_tied", {}, packed)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen2_tied", {"tensor": 2}),
        ("qwen2_tied", {"pipeline": 2}),
        ("qwen2_tied", {"context": 2}),
        ("qwen2_tied", {"tensor": 2, "sequence": True, "data": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}),
    ],
    ids=["tp2", "pp2", "cp2", "tp2-sp-dp2", "dp2-ep2"],
)
def test_every_kind_of_layout(ranks, tmp_path: Path, family: str, layout: dict[str, Any]) -> None:
    check(ranks, tmp_path, family, layout, packed=True)
