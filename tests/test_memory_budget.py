"""Bytes that a GPU holds in each phase: worked sums, and a 32B run that just fits or just does
not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron_stare.config.load import load_config
from megatron_stare.config.resolved import ResolvedRun, resolve_run
from megatron_stare.config.schema import Config, ParallelConfig
from megatron_stare.errors import ConfigError
from megatron_stare.planning.memory import (
    PROCESS_BYTES,
    SERVER_BYTES,
    Fit,
    Needs,
    budget,
    check_memory,
    device_bytes,
    micro_batches_held,
)

GB = 10**9
BOTH = PROCESS_BYTES + SERVER_BYTES  # of a rank and a server on one GPU
QWEN_32B = str(Path(__file__).parent.parent / "assets" / "architectures" / "qwen2.5-32b")
# powers of two: a sum says what is in it
NEEDS = Needs(*(2**n * GB for n in range(10)))
(
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    REFERENCE,
    FORWARD,
    ACTIVATIONS,
    LOGITS,
    BUCKETS,
    SERVED,
    CACHE,
) = (2**n for n in range(10))


def totals(needs: Needs = NEEDS, **settings: Any) -> dict[str, float]:
    """GB, without what processes take."""
    found = budget(needs, 0, **settings)
    processes = PROCESS_BYTES + (SERVER_BYTES if settings["colocated"] else 0)
    return {phase: (found.total(phase) - processes) / GB for phase in found.phases}


def test_everything_leaves_but_what_a_phase_needs():
    assert totals(colocated=True, offload="all") == {
        "rollout": SERVED + CACHE,
        "log_probs": PARAMETERS + REFERENCE + FORWARD + LOGITS,
        "update": PARAMETERS + GRADIENTS + OPTIMIZER + REFERENCE + ACTIVATIONS + LOGITS,
        "sync": PARAMETERS + BUCKETS + SERVED,
        "canary": PARAMETERS + SERVED + CACHE,
        "checkpoint": PARAMETERS + OPTIMIZER + SERVED,
    }


def test_what_stays_is_there_in_every_phase():
    stays = PARAMETERS + REFERENCE
    assert totals(colocated=True, offload="optimizer") == {
        "rollout": stays + SERVED + CACHE,
        "log_probs": stays + FORWARD + LOGITS,
        "update": stays + GRADIENTS + OPTIMIZER + ACTIVATIONS + LOGITS,
        "sync": stays + BUCKETS + SERVED,
        "canary": stays + SERVED + CACHE,
        "checkpoint": stays + OPTIMIZER + SERVED,
    }
    stays += GRADIENTS + OPTIMIZER
    assert totals(colocated=True, offload="none")["rollout"] == stays + SERVED + CACHE


def test_servers_apart_have_their_own_device():
    stays = PARAMETERS + GRADIENTS + OPTIMIZER + REFERENCE
    assert totals(colocated=False, offload="all") == {
        "rollout": SERVED + CACHE,
        "log_probs": stays + FORWARD + LOGITS,
        "update": stays + ACTIVATIONS + LOGITS,
        "sync": stays + BUCKETS,
    }


def test_a_reference_that_moves_is_there_in_its_pass_alone():
    moving = Needs(*(2**n * GB for n in range(10)), reference_moves=True)
    found, stays = (
        totals(moving, colocated=True, offload="none"),
        totals(colocated=True, offload="none"),
    )
    assert found["log_probs"] == stays["log_probs"]
    assert all(found[phase] == stays[phase] - REFERENCE for phase in found if phase != "log_probs")


def test_the_room_of_a_cache_is_that_of_its_fullest_phase():
    found = budget(NEEDS, 900 * GB, colocated=True, offload="all")
    assert found.over == []
    assert found.cache_room == 900 * GB - PARAMETERS * GB - SERVED * GB - BOTH
    exact = budget(NEEDS, found.total("canary"), colocated=True, offload="all")
    assert exact.over == []
    assert exact.cache_room == CACHE * GB
    assert budget(NEEDS, found.total("canary") - 1, colocated=True, offload="all").over == [
        "canary"
    ]


def test_the_table_has_a_row_an_item_and_a_column_a_phase():
    *rows, last = budget(NEEDS, 100 * GB, colocated=True, offload="all").table().splitlines()
    assert rows[0].split() == [
        "GB",
        "rollout",
        "log_probs",
        "update",
        "sync",
        "canary",
        "checkpoint",
    ]
    (parameters,) = (row for row in rows if row.startswith("parameters"))
    assert parameters.split()[1:] == ["1.0"] * 5  # not while servers generate
    assert last.split()[:3] == ["together,", "of", "100.0"]
    assert float(last.split()[3]) == SERVED + CACHE + BOTH / GB


def run_of(**sections: dict[str, Any]) -> ResolvedRun:
    """Qwen2.5-32B as docs/planning.md plans it, on 128 GPUs that 32 servers of four share."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": QWEN_32B, "dtype": "bfloat16", "recompute": "full"},
        "parallel": {"tensor": 8, "pipeline": 4, "data": 4, "sequence": True},
        "optimizer": {"distributed": True},
        "batch": {"micro_batch_tokens": 18_432},
        "rollout": {
            "engine": "sglang",
            "engines": 32,
            "max_prompt_tokens": 2_048,
            "max_new_tokens": 16_384,
        },
        "sglang": {
            "colocated": True,
            "tensor_parallel": 4,
            "cache_tokens": None,
            "memory_fraction": 0.8,
        },
        "algorithm": {"name": "grpo"},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return resolve_run(Config.model_validate(base))


def test_a_32b_run_by_its_matrices():
    """Bytes that `plan_memory` prints of the layout; the servers' by hand: 32,763,876,352 bfloat16
    numbers over four ranks, but each rank has all norms."""
    norms = (2 * 64 + 1) * 5_120
    served = ((32_763_876_352 - norms) // 4 + norms) * 2
    found = Fit(80 * GB).budget(run_of())
    assert found.over == []
    update, rollout = found.phases["update"], found.phases["rollout"]
    assert rollout == {
        "served": served,
        "cache": 64 * GB - served,
        "processes": BOTH,
    }
    assert update["parameters"] == pytest.approx(2.146 * GB, abs=1e6)
    assert update["gradients"] == 2 * update["parameters"]  # float32 beside bfloat16
    # twelve bytes a parameter over four
    assert update["optimizer"] == pytest.approx((1.073 + 2.146) * GB, abs=2e6)
    tokens = (
        Fit(80 * GB).budget(run_of(sglang={"cache_tokens": 100_000})).phases["rollout"]["cache"]
    )
    # layers, two of eight heads a rank, sizes of a head and a number
    assert tokens == 100_000 * 2 * 64 * 2 * 128 * 2


def test_servers_in_8_bits_take_half_and_the_sync_a_bucket_more():
    """All but 2 * 152,064 * 5,120 numbers of the ends, norms and biases; a bucket of the
    embedding."""
    plain, eight = (
        Fit(80 * GB).budget(run_of(sglang={"quantization": each})).phases for each in (None, "fp8")
    )
    matrices = 32_763_876_352 - 2 * 152_064 * 5_120
    saved = plain["rollout"]["served"] - eight["rollout"]["served"]
    assert saved == pytest.approx(matrices / 4, rel=1e-3)
    more = eight["sync"]["buckets"] - plain["sync"]["buckets"]
    assert more == 152_064 * 5_120 * 2


def test_a_share_that_leaves_the_trainer_no_room_is_refused_by_numbers():
    """0.95 of 80 GB, the parameters' 2.146 and 5.5 of two processes are 83.6; 0.9 of it is what
    goes."""
    run = run_of(sglang={"memory_fraction": 0.95})
    with pytest.raises(ConfigError) as refused:
        Fit(80 * GB).require(run)
    text = str(refused.value)
    assert "a GPU of 80.0 GB is too small for the phases rollout, canary\n" in text
    assert "83.6" in text.split("together, of 80.0")[1]
    assert "fix: sglang.memory_fraction=0.9; or more ranks" in text
    Fit(80 * GB).require(run_of(sglang={"memory_fraction": 0.9}))


def test_the_nearest_changes_that_fit_are_named_and_no_others():
    with pytest.raises(ConfigError) as refused:
        Fit(60 * GB).require(run_of(memory={"offload": "none"}))
    assert "memory.offload=all; or" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        Fit(56 * GB).require(run_of(model={"recompute": "none"}))
    assert "too small for the phases update\n" in str(refused.value)
    assert "fix: model.recompute=full; or" in str(refused.value)


def test_an_optimizer_in_host_memory_takes_none_of_the_device() -> None:
    """Twelve bytes a parameter of 32.8 billion over eight ranks: 49.2 GB, with which an update
    takes 83.5."""
    layout = {"tensor": 8, "pipeline": 1, "data": 1, "sequence": True}
    run = run_of(parallel=layout, rollout={"engines": 2}, sglang={"memory_fraction": 0.75})
    with pytest.raises(ConfigError) as refused:
        Fit(80 * GB).require(run)
    text = str(refused.value)
    assert "too small for the phases update\n" in text
    assert "fix: performance.optimizer_offload=true; or more" in text
    there = Fit(80 * GB).budget(run).phases["update"]["optimizer"]
    assert there == pytest.approx(49.2 * GB, rel=0.01)
    offload = {"optimizer_offload": True}
    offloaded = run_of(
        parallel=layout,
        rollout={"engines": 2},
        sglang={"memory_fraction": 0.75},
        performance=offload,
    )
    Fit(80 * GB).require(offloaded)
    assert Fit(80 * GB).budget(offloaded).phases["update"]["optimizer"] == 0


def mixture_of(**model: Any) -> ResolvedRun:
    """Qwen3-30B-A3B: eight expert-parallel ranks, on 128 GPUs that 32 servers share."""
    path = str(Path(QWEN_32B).parent / "qwen3-30b-a3b")
    return run_of(
        model={"path": path, "recompute": "none", **model},
        parallel={"tensor": 1, "pipeline": 1, "expert": 8, "data": 128, "sequence": False},
        batch={"micro_batch_tokens": 16_384},
        rollout={"max_new_tokens": 14_336},
        sglang={"memory_fraction": 0.75},
    )


def test_activations_of_experts_are_counted() -> None:
    """A token keeps the activations of its 8 experts of 768 as those of one of 6144."""
    with pytest.raises(ConfigError) as refused:
        Fit(80 * GB).require(mixture_of())
    text = str(refused.value)
    assert "too small for the phases update\n" in text
    assert "copies of tokens on their way to experts are not counted" in text
    assert "model.recompute=full; or" in text
    Fit(80 * GB).require(mixture_of(recompute="full"))
    kept, less = (
        Fit(80 * GB).budget(mixture_of(**more)).phases["update"]["activations"]
        for more in ({}, {"recompute": "selective", "recompute_modules": ["moe"]})
    )
    # of 48 layers in bfloat16, all but the one that backward computes again
    assert kept - less == 47 * 4 * 8 * 768 * 16_384 * 2


def test_logits_that_a_run_materialises_are_counted_whole() -> None:
    """6.85 GB are less than an eighth of the 63.4 GB that are free when a run chooses its head, so
    an update takes 85.0 GB, not the 78.4 of logits in chunks."""
    changes = ["model.recompute=none", "batch.micro_batch_tokens=22528", "model.dtype=bfloat16"]
    for head, fits in (("auto", False), ("recompute", True), ("materialised", False)):
        config = load_config("recipes/long_cot_r1_distill_1.5b", [*changes, f"model.head={head}"])
        run = resolve_run(config, published=True)
        assert (not Fit(80 * GB).faults(run)) == fits
        if not fits:
            with pytest.raises(ConfigError, match=r"model\.head=recompute; or "):
                Fit(80 * GB).require(run)


def test_a_cache_that_holds_no_response_is_refused():
    with pytest.raises(
        ConfigError, match="cache holds 20000 tokens, a prompt with its response has up to 34816"
    ):
        Fit(80 * GB).require(
            run_of(
                sglang={"cache_tokens": 20_000},
                rollout={"max_new_tokens": 32_768},
                batch={"micro_batch_tokens": 40_000},
            )
        )


def test_the_size_of_a_gpu_is_asked_for_or_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_bytes() is None
    check_memory(run_of(sglang={"memory_fraction": 0.99}))  # of an unknown size
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 81559\necho 81920\n")
    os.chmod(tool, 0o755)
    assert device_bytes() == 81_559 * 2**20
    with pytest.raises(ConfigError, match=r"a GPU of 85\.5 GB is too small"):
        check_memory(run_of(sglang={"memory_fraction": 0.99}))
    with pytest.raises(ConfigError, match=r"a GPU of 20\.0 GB is too small"):
        check_memory(run_of(memory={"device_gb": 20}))


def test_offload_without_servers_on_the_device_is_refused():
    with pytest.raises(
        ConfigError, match=r"memory\.offload: the trainer has its devices for itself"
    ):
        check_memory(run_of(sglang={"colocated": False}, memory={"offload": "all"}))


@pytest.mark.parametrize(
    ("stages", "chunks", "held"),
    [
        (1, 1, [1]),
        (4, 1, [4, 3, 2, 1]),
        # of chunks: 2 for each stage that follows, one of every other chunk for each stage, and the
        # one that is begun
        (2, 2, [(2 + 2 + 1) / 2, (0 + 2 + 1) / 2]),
        (4, 2, [(6 + 4 + 1) / 2, (4 + 4 + 1) / 2, (2 + 4 + 1) / 2, (0 + 4 + 1) / 2]),
        (2, 3, [(2 + 4 + 1) / 3, (0 + 4 + 1) / 3]),
    ],
)
def test_micro_batches_that_a_stage_holds(stages: int, chunks: int, held: list[float]) -> None:
    parallel = ParallelConfig(pipeline=stages, virtual_pipeline=chunks)
    assert [micro_batches_held(parallel, stage) for stage in range(stages)] == held


def test_a_stage_in_chunks_is_budgeted_for_more() -> None:
    """The second of two chunks waits for the first one's micro-batches: 5 halves against 2."""

    def activations(chunks: int) -> list[int]:
        parallel = {"tensor": 8, "pipeline": 2, "virtual_pipeline": chunks}
        given = {"model": {"path": QWEN_32B}, "parallel": parallel, "algorithm": {"name": "grpo"}}
        return [
            each.activations
            for each in Fit(10**12).needs(resolve_run(Config.model_validate(given)))
        ]

    (first, last), (plain_first, plain_last) = activations(2), activations(1)
    assert first / plain_first == pytest.approx(2.5 / 2, rel=0.01)
    assert last / plain_last == pytest.approx(1.5, rel=0.01)
