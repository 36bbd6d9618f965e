"""Training on the graph of the log-prob pass: the same bits as two passes, with one forward
fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import random_batch, save_model
from support.steps import equal, state_of, take_step

from megatron_stare.config.performance import keeps_graph
from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.model.model import unwrap
from megatron_stare.megatron.trainer import Trainer

STARE = {"name": "stare", "variant": "C2", "entropy_target": 3.0}


def config_of(folder: Path, keep_graph: bool, **sections: dict[str, Any]) -> Config:
    settings: dict[str, Any] = {
        "run": {"steps": 3},
        "model": {"path": str(folder)},
        "algorithm": STARE,
        "batch": {"prompts": 4, "samples_per_prompt": 2, "micro_batch_tokens": 300},
        "rollout": {"max_prompt_tokens": 8, "max_new_tokens": 12},
        "optimizer": {"lr": 1e-2},
        "observability": {"measured_every": 0},  # it runs the model once more
        "performance": {"keep_graph": keep_graph},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return Config.model_validate(settings)


def steps_of(rank: int, init: str, config: Config) -> tuple[list[Any], list[Any], list[int]]:
    """Takes three steps. Returned are what they reported, all that they moved, how often the model
    ran forward in each, and the number of micro-batches."""
    trainer = Trainer(resolve_run(config), rank, init)
    forwards = [0]

    def count(*_: Any) -> None:
        forwards[-1] += 1

    unwrap(trainer.policy.model[0]).decoder.register_forward_hook(count)
    reported, state = [], None
    for seed in (1, 2, 3):
        metrics, state = take_step(trainer, random_batch(seed, 8), state or None)
        reported.append(metrics)
        forwards.append(0)
        assert not trainer.step._kept
    moved = state_of(trainer)
    micro_batches = trainer.step.batch.plan.micro_batches
    trainer.close()
    return reported, moved, [*forwards[:3], micro_batches]


LAYOUTS: list[Any] = [
    pytest.param("qwen2", {}, id="one-rank"),
    pytest.param("qwen2_tied", {"parallel": {"tensor": 2, "sequence": True}}, id="tp2-sp"),
    pytest.param("qwen2", {"parallel": {"context": 2}}, id="cp2"),
    pytest.param(
        "qwen2",
        {
            "parallel": {"data": 2},
            "optimizer": {"distributed": True},
            "performance": {
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "gradient_bucket": 3000,
            },
        },
        id="dp2-overlap",
    ),
    pytest.param(
        "qwen3_moe", {"parallel": {"data": 2, "expert": 2}}, id="ep2", marks=pytest.mark.slow
    ),
    pytest.param("qwen2", {"model": {"recompute": "full"}}, id="recompute"),
    pytest.param("qwen2", {"model": {"dtype": "bfloat16"}}, id="bf16"),
    pytest.param(
        "qwen2", {"model": {"head": "gradient_in_forward", "head_chunk_tokens": 5}}, id="fused-head"
    ),
]


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize(("family", "sections"), LAYOUTS)
def test_the_same_bits(ranks, tmp_path: Path, family: str, sections: dict[str, Any]) -> None:
    save_model(tmp_path, family)
    twice, once = (config_of(tmp_path, keep, **sections) for keep in (False, True))
    before = ranks.run(steps_of, twice.parallel.world_size, twice)
    after = ranks.run(steps_of, once.parallel.world_size, once)
    for (metrics, moved, forwards), (kept_metrics, kept_moved, kept_forwards) in zip(
        before, after, strict=True
    ):
        assert repr(metrics) == repr(kept_metrics)  # a NaN is equal to a NaN
        assert equal(moved, kept_moved)
        assert (forwards, kept_forwards) == ([2, 2, 2, 1], [1, 1, 1, 1])


@pytest.mark.distributed
def test_several_micro_batches_are_not_kept(ranks, tmp_path: Path) -> None:
    """Their activations would all live at once."""
    save_model(tmp_path, "qwen2")
    config = config_of(tmp_path, True, batch={"micro_batch_tokens": 30})
    (_, _, (*forwards, micro_batches)) = ranks.run(steps_of, 1, config)[0]
    assert micro_batches > 1 and min(forwards) >= 4


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"pipeline": 2}},
        {"batch": {"mini_batch_prompts": 2}},
        {"batch": {"epochs": 2}},
        {"statistics": {"gate": "lagged"}},
        {"moe": {"routing_replay": True}},
        {"performance": {"keep_graph": False}},
    ],
    ids=["pipeline", "mini-batches", "epochs", "lagged", "replay", "off"],
)
def test_nothing_is_kept_that_could_not_be_used(tmp_path: Path, sections: dict[str, Any]) -> None:
    assert keeps_graph(config_of(tmp_path, True), 1)
    assert not keeps_graph(config_of(tmp_path, True, **sections), 1)
