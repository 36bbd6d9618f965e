"""State that leaves the device holds nothing there, and goes on after its return as if it had
stayed, bit for bit."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from support.held import held
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import equal, loss_scale_state, plan_of, state_of, take_step

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.trainer import Trainer

pytestmark = pytest.mark.distributed


def values_of(trainer: Trainer) -> list[Any]:
    reference = trainer.policy.reference
    kept = (
        [p.detach().clone() for chunk in reference.model for p in chunk.parameters()]
        if reference
        else []
    )
    return [*state_of(trainer), *loss_scale_state(trainer), *kept]


def three_steps(rank: int, init: str, config: Config, folder: str, moved: bool) -> list[list[Any]]:
    """The state after every step, of a checkpoint begun after the first, and the weights streamed
    after the last."""
    trainer = Trainer(resolve_run(config), rank, init)
    found, reported = [], []
    for step in (1, 2, 3):
        metrics, _ = take_step(trainer, random_batch(step, 8))
        reported += [x for row in metrics for x in row.items()]
        found.append(values_of(trainer))
        if step == 1:
            if moved:
                moved_and_back(trainer, found[-1])
                trainer.offload()  # `save` brings back what it needs
            trainer.save(folder)
        if moved:  # while the checkpoint is written
            trainer.offload()
            assert not any(held(trainer).values()), held(trainer)
            assert RotaryEmbedding.forward.cache_info().currsize == 0
        if step == 2:
            trainer.finish_save()
    trainer.begin_weight_stream()
    buckets = [trainer.next_bucket() for _ in trainer.bucket_layouts()]
    trainer.end_weight_stream()
    found.append([bucket.clone() for bucket in buckets if bucket is not None])
    if moved:
        assert not held(trainer)["optimizer"]  # a weight sync is in no need of it
        assert not held(trainer)["gradients"]
        trainer.offload()
    trainer.load(folder)
    found.append(values_of(trainer))
    trainer.close()
    return [reported, *found]


def moved_and_back(trainer: Trainer, values: list[Any]) -> None:
    """Part by part out, all of it back: the same values in the same places, gradients zero."""
    before = held(trainer)
    assert before["parameters"]
    assert before["gradients"]
    assert before["optimizer"]
    for part in ("optimizer", "gradients", "reference", "parameters"):
        trainer.offload((part,))
        trainer.offload((part,))  # is no harm
        assert held(trainer)[part] == 0
        if part == "gradients":  # these two alone: the weights can still be read
            assert held(trainer)["parameters"] == before["parameters"]
    trainer.onload()
    trainer.onload()
    assert held(trainer) == before
    assert equal(values_of(trainer), values)
    for chunk in trainer.policy.model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            assert not buffer.grad_data.any()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2-reference": (
        "qwen2_tied",
        {"parallel": {"tensor": 2}, "algorithm": {"name": "grpo", "reference_kl": {"coef": 0.1}}},
    ),
    "dp2-bfloat16-distributed-overlapped": (
        "qwen2",
        {
            "parallel": {"data": 2},
            "model": {"dtype": "bfloat16"},
            "optimizer": {"lr": 1e-2, "distributed": True},
            "performance": {
                "overlap_grad_reduce": True,
                "overlap_param_gather": True,
                "gradient_bucket": 3000,
            },
        },
    ),
    "pp2-float16": ("qwen2_tied", {"parallel": {"pipeline": 2}, "model": {"dtype": "float16"}}),
    "cp2-distributed": (
        "qwen3",
        {"parallel": {"context": 2}, "optimizer": {"lr": 1e-2, "distributed": True}},
    ),
    "ep2-bfloat16-distributed": (
        "qwen3_moe",
        {
            "parallel": {"data": 2, "expert": 2},
            "model": {"dtype": "bfloat16"},
            "optimizer": {"lr": 1e-2, "distributed": True},
        },
    ),
    "tp2-pp2-sequence": (
        "qwen3",
        {
            "parallel": {"tensor": 2, "pipeline": 2, "sequence": True},
            "model": {"dtype": "bfloat16"},
        },
    ),
}
SLOW = ("tp2-pp2-sequence",)


@pytest.mark.wide
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case in SLOW else case for case in CASES]
)
def test_a_run_that_is_moved_equals_one_that_is_not(
    writers: RankPool, tmp_path: Path, case: str
) -> None:
    family, sections = CASES[case]
    save_model(tmp_path / "model", family)
    config = Config.model_validate(
        {
            "batch": {"micro_batch_tokens": 48},
            "optimizer": {"lr": 1e-2},
            "algorithm": {"name": "grpo"},
            **sections,
            "model": {"path": str(tmp_path / "model"), **sections.get("model", {})},
        }
    )
    for name in ("still", "moved"):
        (tmp_path / name).mkdir()
    world = config.parallel.world_size
    still = writers.run(three_steps, world, config, str(tmp_path / "still"), False)
    moved = writers.run(three_steps, world, config, str(tmp_path / "moved"), True)
    for one, other in zip(still, moved, strict=True):
        for before, after in zip(one, other, strict=True):
            assert equal(before, after)
        began, loaded = ([x for x in state if torch.is_tensor(x)] for state in (one[1], one[-1]))
        assert equal(began, loaded)  # the checkpoint is of the state in which it was begun


def compared_twice(rank: int, init: str, config: Config) -> list[Any]:
    """Compares with everything in its place, and then with everything away."""
    trainer = Trainer(resolve_run(config), rank, init)
    batch = random_batch(1, 8)
    plan, engines = plan_of(config, batch), torch.zeros(1, len(batch.rollout_log_probs))
    found = []
    for away in (False, True):
        if away:
            trainer.offload()
        found.append(trainer.compare_with(batch.share(plan.branches_of(0)), plan, engines, 1.0))
    trainer.close()
    return found


def test_a_comparison_brings_back_the_weights_that_it_reads(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2_tied")
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "batch": {"micro_batch_tokens": 48},
            "algorithm": {"name": "grpo"},
        }
    )
    ((here, away),) = ranks.run(compared_twice, 1, config)
    assert here == away and here[0].everywhere.largest > 0


def memory_over_a_move(rank: int, init: str, config: Config) -> tuple[dict[str, int], list[int]]:
    """Bytes of the parts, and what this process alone holds before it, meanwhile and after."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, 8))

    def own() -> int:
        gc.collect()
        # what earlier tests of this process freed goes now, not in the middle of the move
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        return psutil.Process().memory_full_info().uss

    trainer.offload()  # what the allocator takes for itself, it takes the first time
    trainer.onload()
    parts, sizes = held(trainer), [own()]
    trainer.offload()
    sizes.append(own())
    trainer.onload()
    sizes.append(own())
    trainer.close()
    return parts, sizes


def test_the_process_gives_memory_back(ranks: RankPool, tmp_path: Path) -> None:
    """Host and device are one memory here: a copy takes what its original gives back, and gradients
    have none."""
    save_model(tmp_path, "qwen2_tied", vocab_size=32_000, hidden_size=320)
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "batch": {"micro_batch_tokens": 48},
            "algorithm": {"name": "grpo"},
            "optimizer": {"distributed": True},
        }
    )
    ((parts, (before, away, after)),) = ranks.run(memory_over_a_move, 1, config)
    # of which one allocation is enough to be the kernel's again once it is free
    assert parts["gradients"] > 40e6
    # float32: no masters
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    assert before - away == pytest.approx(parts["gradients"], rel=0.1)
    assert after - before < 0.1 * parts["gradients"]
