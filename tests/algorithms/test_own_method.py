"""The example of docs/algorithms/own_method.md: a method in a file of its own, named by its dotted
path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import random_batch, save_model
from support.steps import log_prob_pass
from support.token_batches import by_sequence, loss_and_gradient, token_batch
from torch import Tensor

from megatron_stare.config.load import build_method
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.errors import ConfigError
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.planning.preflight import check

NAME = "my_method.MyMethod"
REWARDS = [1.0, 0.0, 0.0, 1.0]


def test_it_is_found_by_its_dotted_path_and_refuses_what_it_does_not_know() -> None:
    assert build_method({"name": NAME, "strength": 2}).strength == 2  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="did you mean 'strength'"):
        build_method({"name": NAME, "strenght": 2})


def test_strength_0_is_grpo() -> None:
    mine, grpo = build_method({"name": NAME, "strength": 0}), build_method({"name": "grpo"})
    batch = token_batch(REWARDS, method=grpo)
    torch.testing.assert_close(loss_and_gradient(mine, batch), loss_and_gradient(grpo, batch))


def test_it_weighs_by_surprisal_and_is_exact_over_micro_batches() -> None:
    method = build_method({"name": NAME})
    batch = token_batch(REWARDS, method=method, off_policy=0.0)
    loss, gradient = loss_and_gradient(method, batch)
    _, plain = loss_and_gradient(build_method({"name": "grpo"}), batch)
    surprisal = batch.surprisal
    torch.testing.assert_close(gradient, plain / (1 + surprisal / surprisal.max()))
    torch.testing.assert_close(loss_and_gradient(method, batch, by_sequence(batch))[0], loss)


def _step(
    rank: int, init: str, config: Config
) -> tuple[dict[str, float] | None, dict[str, Tensor]]:
    """One training step on this rank: the step's metrics, and this rank's part of the new
    weights."""
    trainer = Trainer(resolve_run(config), rank, init)
    log_prob_pass(trainer, trainer.method.judge(random_batch(seed=3, size=10)))
    trainer.measure(trainer.method.initial_state())
    reported = trainer.update()
    weights = trainer.export()
    trainer.close()
    return reported[0] if reported else None, weights


@pytest.mark.distributed
def test_it_trains_over_tensor_and_data_ranks_as_on_one(ranks, tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2_tied")
    steps = []
    for name, parallel, budget in (
        (NAME, {}, 1000),
        (NAME, {"tensor": 2, "data": 2}, 40),
        ("grpo", {}, 1000),
    ):
        config = check(
            Config.model_validate(
                {
                    "model": {"path": str(tmp_path)},
                    "parallel": parallel,
                    "algorithm": {"name": name},
                    "batch": {"micro_batch_tokens": budget},
                    "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 12},
                    "optimizer": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 1e9},
                }
            )
        ).config
        parts = ranks.run(_step, config.parallel.world_size, config)
        (metrics,) = [reported for reported, _ in parts if reported is not None]
        steps.append(
            (metrics, {name: tensor for _, weights in parts for name, tensor in weights.items()})
        )
    (metrics, weights), (cut_metrics, cut_weights), (_, plain_weights) = steps
    for key in ("my_method/largest", "loss/policy", "optimizer/grad_norm"):
        assert cut_metrics[key] == pytest.approx(metrics[key], rel=1e-5, abs=1e-6), key
    torch.testing.assert_close(cut_weights, weights, rtol=1e-5, atol=1e-6)
    assert any(
        not torch.allclose(plain_weights[name], weight, atol=1e-3)
        for name, weight in weights.items()
    )


def test_the_page_shows_the_file() -> None:
    here = Path(__file__).parent
    page = (here.parent.parent / "docs/algorithms/own_method.md").read_text()
    assert (here / "my_method.py").read_text().strip() in page
