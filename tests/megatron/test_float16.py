"""Training in float16: gradients are those of float32, and what a loss scale that is too large
leaves behind."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.models import random_batch, save_model
from support.ranks import RankPool
from support.steps import equal, log_prob_pass, loss_scale_state, state_of, take_step
from torch import Tensor

from megatron_stare.config.resolved import resolve_run
from megatron_stare.config.schema import Config
from megatron_stare.megatron.backend.layout import leave
from megatron_stare.megatron.export.export import main_grad
from megatron_stare.megatron.model.model import named_parameters
from megatron_stare.megatron.step import step as step_module
from megatron_stare.megatron.trainer import Trainer
from megatron_stare.ops import vocab_parallel

pytestmark = pytest.mark.distributed
SIZE = 8
HEADS = ["materialised", "gradient_in_forward", "recompute"]
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "tp2": ("qwen2_tied", {"tensor": 2}, False),
    "pp2": ("qwen2_tied", {"pipeline": 2}, False),
    "dp2": ("qwen2", {"data": 2}, False),
    "dp2-distributed": ("qwen2", {"data": 2}, True),
    "tp2-distributed": ("qwen2_tied", {"tensor": 2, "sequence": True}, True),
    "ep2": ("qwen3_moe", {"data": 2, "expert": 2}, False),
    "cp2": ("qwen2_tied", {"context": 2}, True),
    "cp2-tp2": ("qwen2", {"context": 2, "tensor": 2, "sequence": True}, False),
}
SLOW = pytest.mark.slow


def config_of(path: Path, dtype: str = "float16", **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "run": {"steps": 10},
        "model": {"path": str(path), "dtype": dtype, "head_chunk_tokens": 5},
        "batch": {"prompts": SIZE // 2, "samples_per_prompt": 2, "micro_batch_tokens": 40},
        "algorithm": {"name": "grpo"},
        "optimizer": {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "schedule": "linear",
            "initial_loss_scale": 2.0**12,
        },
        "observability": {"entropy_forecast": False},
    }
    return Config.model_validate(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )


# --- gradients ---


def faint_gradients(
    rank: int, init: str, config: Config, folder: str, triton: bool
) -> dict[str, float] | None:
    """Writes the gradients of a batch whose advantages are so small that unscaled slopes of its
    logits, less than a millionth, would be lost in float16; gives the metrics."""
    if triton:
        assert os.environ.get("TRITON_INTERPRET") or torch.cuda.is_available()
        vocab_parallel._runs_triton = lambda logits: True
    try:
        trainer = Trainer(resolve_run(config), rank, init)
        batch = random_batch(5, SIZE)
        assert batch.advantages is not None
        batch.advantages = batch.advantages * 1e-5
        log_prob_pass(trainer, batch)
        trainer.measure(trainer.method.initial_state())
        result = trainer.update(0, folder)
        trainer.close()
    finally:
        vocab_parallel._runs_triton = _RUNS_TRITON
    return result[0] if result else None


_RUNS_TRITON = vocab_parallel._runs_triton


def check_gradients(ranks: RankPool, path: Path, config: Config, *, triton: bool = False) -> None:
    """Holds every gradient to within a hundredth of float32's, by its norm."""
    single = config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": "float32", "head": "materialised"}),
            "parallel": type(config.parallel)(),
            "optimizer": config.optimizer.model_copy(update={"distributed": False}),
        }
    )
    found = []
    for name, each, with_triton in (("wanted", single, False), ("got", config, triton)):
        folder = path / name
        results = ranks.run(
            faint_gradients, each.parallel.world_size, each, str(folder), with_triton
        )
        (metrics,) = [metrics for metrics in results if metrics]
        assert metrics["update/finite"] == 1.0 and metrics.get("update/skipped", 0.0) == 0.0
        found.append((metrics, load_file(folder / "gradients.safetensors")))
    (wanted_metrics, wanted), (metrics, got) = found
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = float((got[name] - gradient).norm() / gradient.norm())
        assert error < 1e-2, f"{name}: off by {error:.3g} of its norm {float(gradient.norm()):.3g}"
    # before clipping, and of the gradient, not of the scaled one
    assert metrics["optimizer/grad_norm"] == pytest.approx(
        wanted_metrics["optimizer/grad_norm"], rel=1e-2
    )


@pytest.mark.parametrize("head", [*HEADS, "triton"])
def test_every_head_gives_float32s_gradients(ranks: RankPool, tmp_path: Path, head: str) -> None:
    if head == "triton":
        pytest.importorskip("triton")
    save_model(tmp_path / "model", "qwen2")
    mode = "materialised" if head == "triton" else head
    config = config_of(
        tmp_path / "model", model={"head": mode}, optimizer={"initial_loss_scale": 2.0**22}
    )
    check_gradients(ranks, tmp_path, config, triton=head == "triton")


@pytest.mark.parametrize(
    ("layout", "head"),
    [
        ("tp2", "gradient_in_forward"),
        ("pp2", "recompute"),
        ("dp2-distributed", "materialised"),
        ("cp2", "gradient_in_forward"),
        pytest.param("cp2", "recompute", marks=SLOW),
        pytest.param("cp2-tp2", "materialised", marks=SLOW),
        pytest.param("cp2-tp2", "gradient_in_forward", marks=SLOW),
    ],
)
def test_every_layout_gives_float32s_gradients(
    ranks: RankPool, tmp_path: Path, layout: str, head: str
) -> None:
    family, parallel, distributed = LAYOUTS[layout]
    save_model(tmp_path / "model", family)
    config = config_of(
        tmp_path / "model",
        model={"head": head},
        parallel=parallel,
        optimizer={"initial_loss_scale": 2.0**22, "distributed": distributed},
    )
    check_gradients(ranks, tmp_path, config)


@pytest.mark.parametrize("layout", ["cp2", pytest.param("cp2-tp2", marks=SLOW)])
def test_bfloat16_over_split_sequences_is_as_near_as_on_one_rank(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Its gradients lie no further from float32's than one rank's do in bfloat16, but for a
    half."""
    family, parallel, distributed = LAYOUTS[layout]
    save_model(tmp_path / "model", family)
    found = {}
    for name, dtype, cut in (
        ("exact", "float32", {}),
        ("whole", "bfloat16", {}),
        ("split", "bfloat16", parallel),
    ):
        optimizer = {"distributed": distributed and bool(cut)}
        config = config_of(tmp_path / "model", dtype, parallel=cut, optimizer=optimizer)
        folder = tmp_path / name
        ranks.run(faint_gradients, config.parallel.world_size, config, str(folder), False)
        found[name] = load_file(folder / "gradients.safetensors")
    exact = found["exact"]
    whole, split = (
        {name: float((found[of][name] - each).norm() / each.norm()) for name, each in exact.items()}
        for of in ("whole", "split")
    )
    assert 1e-4 < max(whole.values()) < 0.1
    assert max(split.values()) <= 1.5 * max(whole.values())
    assert sum(split.values()) <= 1.5 * sum(whole.values())


# --- clipping ---


def moved_by_a_step(rank: int, init: str, config: Config) -> tuple[float, dict[str, float]]:
    """How far a step of plain gradient descent moves the float32 parameters, and what it
    reports."""
    trainer = Trainer(resolve_run(config), rank, init)
    masters = [p for group in trainer.policy.optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in masters]
    (metrics,), _ = take_step(trainer, random_batch(5, SIZE))
    moved = torch.stack(
        [(p.detach() - old).norm() for p, old in zip(masters, before, strict=True)]
    ).norm()
    dtypes = {p.dtype for p in masters}
    trainer.close()
    assert dtypes == {torch.float32}
    return float(moved), metrics


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_the_unscaled_gradient_is_clipped(ranks: RankPool, tmp_path: Path, clip: float) -> None:
    """A step moves by the rate times the smaller of norm and clip."""
    save_model(tmp_path, "qwen2")
    plain = {
        "name": "sgd",
        "lr": 0.5,
        "schedule": "constant",
        "weight_decay": 0.0,
        "clip_grad": clip,
    }
    ((moved, metrics),) = ranks.run(moved_by_a_step, 1, config_of(tmp_path, optimizer=plain))
    norm = metrics["optimizer/grad_norm"]
    assert 0.1 < norm < 100
    assert moved == pytest.approx(0.5 * min(norm, clip), rel=1e-3)


# --- overflow ---


def overflowing_step(trainer: Trainer) -> dict[str, float] | None:
    """An update whose scaled gradient overflows float16 on one rank alone: on a data or context
    rank because of an advantage, where ranks split the model because an entry of one rank's part is
    infinite."""
    batch, layout = random_batch(2, SIZE), trainer.policy.layout
    log_prob_pass(trainer, batch)
    trainer.measure(trainer.method.initial_state())
    accumulate = step_module.accumulate_gradients
    measured = trainer.step.measured
    if layout.cp > 1:
        if measured is not None and layout.cp_rank == layout.cp - 1:
            measured.tokens.advantage[:1] = 1e9
    elif layout.dp > 1:
        if measured is not None:
            measured.tokens.advantage[measured.tokens.sequence == 0] = 1e9
    else:

        def poked(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            logged = accumulate(*args, **kwargs)
            if layout.rank == layout.world - 1:
                cut = [
                    p
                    for name, p in named_parameters(trainer.policy.model)
                    if name.endswith("linear_fc1.weight")
                ]
                main_grad(cut[0])[0, 0] = torch.inf
            return logged

        step_module.accumulate_gradients = poked  # type: ignore[assignment]
    try:
        result = trainer.update(0)
    finally:
        step_module.accumulate_gradients = accumulate
    return result[0] if result else None


def after_overflows(
    rank: int, init: str, config: Config, number: int
) -> tuple[list[bool], list[dict[str, float]], dict[str, Tensor], list[dict[str, float]]]:
    """A step, so many that overflow, and another step: whether each of those in between moved this
    rank's state, what they reported here, the policy at the end, and what the steps reported."""
    trainer = Trainer(resolve_run(config), rank, init)
    first, _ = take_step(trainer, random_batch(1, SIZE))
    moved, reported = [], []
    for _ in range(number):
        before = state_of(trainer)
        metrics = overflowing_step(trainer)
        moved.append(not equal(before, state_of(trainer)))
        reported += [metrics] if metrics else []
    if not number:  # as if it had begun where the others end
        optimizer = trainer.policy.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):  # in all its parts
            part.grad_scaler._scale = torch.full_like(part.grad_scaler._scale, 2.0**9)
            part.grad_scaler._growth_tracker = 0
    last, _ = take_step(trainer, random_batch(3, SIZE))
    result = moved, reported, trainer.export(), first + last
    trainer.close()
    return result


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=SLOW) if name.startswith("cp2") else name for name in LAYOUTS],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Three in a row change nothing but the scale, which the next step has in all its parts."""
    family, parallel, distributed = LAYOUTS[layout]
    save_model(tmp_path, family)
    config = config_of(tmp_path, parallel=parallel, optimizer={"distributed": distributed})
    world = config.parallel.world_size
    straight = ranks.run(after_overflows, world, config, 0)
    skipping = ranks.run(after_overflows, world, config, 3)
    for moved, *_ in skipping:
        assert moved == [False, False, False]
    ((reported, rows),) = [(reported, rows) for _, reported, _, rows in skipping if rows]
    assert [row["optimizer/loss_scale"] for row in reported] == [2.0**12, 2.0**11, 2.0**10]
    for row in reported:
        assert (row["update/skipped"], row["update/finite"], row["update/empty"]) == (1.0, 1.0, 0.0)
        assert not math.isfinite(row["optimizer/grad_norm"])
    ((_, wanted_rows),) = [(reported, rows) for _, reported, _, rows in straight if rows]
    assert rows == wanted_rows  # the learning rate of the second step, among all else
    assert rows[1]["optimizer/loss_scale"] == 2.0**9 and rows[1]["update/skipped"] == 0.0
    for (*_, want, _), (*_, got, _) in zip(straight, skipping, strict=True):
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name


def without_a_finite_gradient(
    rank: int, init: str, config: Config, advantage: float
) -> tuple[bool, dict[str, float] | None, list[Any]]:
    """After a step, an update of whose tokens one response has this advantage: whether it moved
    this rank's state, what it reported, and what is known of the scale."""
    trainer = Trainer(resolve_run(config), rank, init)
    take_step(trainer, random_batch(1, SIZE))
    before = state_of(trainer)
    log_prob_pass(trainer, random_batch(2, SIZE))
    trainer.measure(trainer.method.initial_state())
    if (measured := trainer.step.measured) is not None:
        measured.tokens.advantage[measured.tokens.sequence == 0] = advantage
    result = trainer.update(0)
    found = (
        not equal(before, state_of(trainer)),
        result[0] if result else None,
        loss_scale_state(trainer),
    )
    trainer.close()
    return found


@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}], ids=["dp2", "pp2"])
def test_a_loss_that_is_not_finite_is_no_fault_of_the_scale(
    ranks: RankPool, tmp_path: Path, parallel: dict[str, int]
) -> None:
    save_model(tmp_path, "qwen2_tied")
    results = ranks.run(
        without_a_finite_gradient, 2, config_of(tmp_path, parallel=parallel), math.nan
    )
    for moved, _, scale in results:
        assert (moved, scale) == (False, [2.0**12, 1, 1])
    ((row,),) = [[row] for _, row, _ in results if row]
    assert (row["update/finite"], row["update/skipped"]) == (0.0, 0.0)


def test_an_overflow_at_the_smallest_scale_counts_as_not_finite(
    ranks: RankPool, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen2")
    config = config_of(tmp_path, optimizer={"min_loss_scale": 2.0**12})
    ((moved, row, scale),) = ranks.run(without_a_finite_gradient, 1, config, 1e9)
    assert row is not None
    assert (moved, row["update/finite"], row["update/skipped"], scale) == (
        False,
        0.0,
        0.0,
        [2.0**12, 1, 1],
    )


# --- resume ---


def twenty_steps(
    rank: int, init: str, config: Config, folder: str, resumed: bool
) -> tuple[list[dict[str, float]], dict[str, Tensor], list[Any]]:
    """Saved after ten of twenty steps, or continued from there: what was reported, the policy, and
    what is known of the scale where the two meet."""
    trainer = Trainer(resolve_run(config), rank, init)
    rows: list[dict[str, float]] = []
    if resumed:
        trainer.load(folder)
    else:
        for number in range(10):
            rows += take_step(trainer, random_batch(number, SIZE))[0]
        trainer.save(folder)
    scale = loss_scale_state(trainer)
    for number in range(10, 20):
        rows += take_step(trainer, random_batch(number, SIZE))[0]
    trainer.finish_save()
    result = rows, trainer.export(), scale
    trainer.close()
    return result


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "layout", "head"),
    [
        ("float16", "dp2-distributed", "gradient_in_forward"),
        ("float16", "pp2", "recompute"),
        ("bfloat16", "tp2-distributed", "recompute"),
        pytest.param("float16", "tp2", "materialised", marks=SLOW),
        pytest.param("float16", "ep2", "materialised", marks=SLOW),
        pytest.param("bfloat16", "dp2", "gradient_in_forward", marks=SLOW),
        pytest.param("float16", "cp2", "gradient_in_forward", marks=SLOW),
        pytest.param("bfloat16", "cp2-tp2", "recompute", marks=SLOW),
    ],
)
def test_resumed_equals_uninterrupted(
    writers: RankPool, tmp_path: Path, dtype: str, layout: str, head: str
) -> None:
    """Bit for bit in all that is reported, with overflows before and after."""
    family, parallel, distributed = LAYOUTS[layout]
    save_model(tmp_path / "model", family)
    (tmp_path / "checkpoint").mkdir()
    config = config_of(
        tmp_path / "model",
        dtype,
        run={"steps": 20},
        model={"head": head},
        parallel=parallel,
        optimizer={
            "distributed": distributed,
            "initial_loss_scale": 2.0**22,
            "loss_scale_window": 5,
            "hysteresis": 2,
            "growth_factor": 16.0,  # so that what it grows to overflows
        },
    )
    world = config.parallel.world_size
    straight = writers.run(twenty_steps, world, config, str(tmp_path / "checkpoint"), False)
    resumed = writers.run(twenty_steps, world, config, str(tmp_path / "checkpoint"), True)
    for (rows, want, scale), (again, got, scale_again) in zip(straight, resumed, strict=True):
        assert repr(again) == repr(rows[10:])  # NaN is NaN again
        assert scale_again == scale
        assert got.keys() == want.keys()
        for name, weight in want.items():
            assert torch.equal(got[name], weight), name
            assert weight.isfinite().all()
    (rows,) = [rows for rows, *_ in straight if rows]
    assert len(rows) == 20
    if dtype == "float16":
        assert all(part != new for part, new in zip(straight[0][2], [2.0**22, 0, 2], strict=True))
        for half in (rows[:10], rows[10:]):
            assert 0 < sum(row["update/skipped"] for row in half) < 10
        assert [row["optimizer/loss_scale"] for row in rows] == replayed(
            rows, 2.0**22, window=5, hysteresis=2, growth=16
        )


def replayed(
    rows: list[dict[str, float]], scale: float, *, window: int, hysteresis: int, growth: int
) -> list[float]:
    """The scale of every step, from which steps were skipped."""
    found, taken, left = [], 0, hysteresis
    for row in rows:
        found.append(scale)
        if row["update/skipped"]:
            taken, left = 0, left - 1
            scale = scale / 2 if left <= 0 else scale
        else:
            taken += 1
            if taken == window:
                taken, left, scale = 0, hysteresis, scale * growth
    return found


# --- the start ---


def refusal(rank: int, init: str, config: Config) -> str:
    try:
        Trainer(resolve_run(config), rank, init).close()
    except Exception as error:
        leave()
        return f"{type(error).__name__}: {error}"
    return "none"


def test_weights_that_float16_cannot_hold(ranks: RankPool, tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen2")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 4] = 7e4
    model.save_pretrained(tmp_path)
    (said,) = ranks.run(refusal, 1, config_of(tmp_path))
    assert said.startswith("DataError") and str(tmp_path) in said
    assert "decoder.layers.2.mlp.linear_fc2.weight is not finite in float16" in said
    assert ranks.run(refusal, 1, config_of(tmp_path, "bfloat16")) == ["none"]
