"""Masters that the inner optimizer keeps, precision-aware or on the host: steps, clipping and
resumes as without."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adams import ADAMS, installed, offloading, precision_aware
from support.killing import hold_children_at
from support.models import save_model
from support.ranks import RankPool
from torch import Tensor

from megatron_stare.config.schema import (
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PerformanceConfig,
)
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.model.model import build_policy, load_hf, named_parameters
from megatron_stare.megatron.optimizer.distributed_optimizer import (
    joined,
    parted,
    read_master,
    write_master,
)
from megatron_stare.megatron.optimizer.optimizer import build_optimizer, loss_scale_of, take_step
from megatron_stare.megatron.optimizer.optimizer_state import read_step
from megatron_stare.models import read_shape
from megatron_stare.weights.files.hf_folder import HfFolder

LAYOUT = ParallelConfig(data=2)
STEPS = 5
# how Megatron finds its optimizer, and what is asked of it
KINDS: dict[str, tuple[Any, PerformanceConfig]] = {
    "plain": (contextlib.nullcontext, PerformanceConfig()),
    "late": (lambda: installed(ADAMS["late"]), PerformanceConfig()),
    "precision-aware": (precision_aware, PerformanceConfig(precision_aware_optimizer=True)),
    "offloaded": (offloading, PerformanceConfig(optimizer_offload=True)),
}


class Run:
    """A policy over two data ranks and its distributed optimizer; gradients are drawn from the
    number of the step."""

    def __init__(
        self, path: str, layout: parallel_layout.Layout, dtype: str, kind: str, clip: float = 1e9
    ) -> None:
        found, performance = KINDS[kind]
        shape = read_shape(path)
        self.layout, self.clip, self.done = layout, clip, 0
        self.model = build_policy(
            shape, ModelConfig(path=path, dtype=dtype), LAYOUT, layout, True, performance
        )
        load_hf(self.model, HfFolder(path), shape, layout)
        # so that clipping shows
        config = OptimizerConfig(lr=0.05, weight_decay=0.1, eps=1e-3, distributed=True)
        with found():
            self.optimizer, self.scheduler = build_optimizer(
                self.model, config, dtype, STEPS, performance
            )

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.optimizer.chained_optimizers[0].optimizer

    def steps(self, until: int) -> Run:
        for number in range(self.done, until):
            generator = torch.Generator().manual_seed(number)
            scale = loss_scale_of(self.optimizer)
            by = 1.0 if scale is None else float(scale.factor)
            for _, parameter in named_parameters(self.model):
                parameter.main_grad.copy_(by * torch.randn(parameter.shape, generator=generator))
            assert take_step(
                self.optimizer, self.scheduler, self.clip, empty=None, loss_not_finite=None
            ).taken
        self.done = until
        return self

    def checkpoint(self, folder: Path) -> tuple[Any, ...]:
        return str(folder), self.model, self.optimizer, self.scheduler, self.layout

    def masters(self) -> list[Tensor]:
        """In float32, of this rank's stretches."""
        ones = [p for group in self.inner.param_groups for p in group["params"]]
        states = [self.inner.state[p] for p in ones]
        if ones[0].dtype == torch.float32:
            return [p.detach().clone() for p in ones]
        return [read_master(p, state).clone() for p, state in zip(ones, states, strict=True)]

    def moments(self) -> list[Tensor]:
        """Both of each, of this rank's stretches."""
        ones = [p for group in self.inner.param_groups for p in group["params"]]
        return [
            self.inner.state[p][name].float().clone()
            for p in ones
            for name in ("exp_avg", "exp_avg_sq")
        ]

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for _, p in named_parameters(self.model)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def differing(
    rank: int, init: str, path: str, folder: str, kind: str, dtype: str
) -> dict[str, bool]:
    """Each claim, and whether it holds here."""
    layout = parallel_layout.join(LAYOUT, rank, init, seed=1, timeout_s=60)
    like = "late" if kind == "precision-aware" else "plain"
    truth, whole = (Run(path, layout, dtype, each).steps(STEPS) for each in (like, kind))
    near = [
        torch.allclose(a, b, rtol=1e-6, atol=1e-7)
        for a, b in zip(whole.masters(), truth.masters(), strict=True)
    ]
    clipped = [
        Run(path, layout, dtype, each, clip=0.5).steps(STEPS).masters() for each in (like, kind)
    ]
    found = {
        "masters are those of an optimizer that keeps its own": all(near),
        "clipped too": all(
            torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*clipped, strict=True)
        ),
        "and clipping shows": not same(clipped[1], whole.masters()),
    }
    for step in (0, 3):
        at = Path(folder) / f"{step}"
        cut = Run(path, layout, dtype, kind).steps(step)
        before = cut.weights()
        _save(at, cut)
        found[f"saving at {step} changes nothing"] = same(before, cut.weights())
        # of other moments and masters than those it loads
        after = Run(path, layout, dtype, kind).steps(1)
        checkpoint.load(*after.checkpoint(at))
        after.done = step
        found[f"loaded at {step}: count"] = read_step(after.inner) == step
        found[f"loaded at {step}: weights"] = same(before, after.weights())
        after.steps(STEPS)
        found[f"resumed at {step}"] = same(after.masters(), whole.masters()) and same(
            after.weights(), whole.weights()
        )
    for first, second in ((like, kind), (kind, like)):  # a run may go on with the other
        at = Path(folder) / f"{first} then {second}"
        cut, after = Run(path, layout, dtype, first).steps(3), Run(path, layout, dtype, second)
        _save(at, cut)
        checkpoint.load(*after.checkpoint(at))
        found[f"{first} then {second}: masters"] = same(after.masters(), cut.masters())
        found[f"{first} then {second}: count"] = read_step(after.inner) == 3
    parallel_layout.leave()
    return found


def _save(at: Path, run: Run) -> None:
    at.mkdir(exist_ok=True)
    torch.distributed.barrier()
    checkpoint.save(*run.checkpoint(at))


SLOW = [("precision-aware", "float16"), ("precision-aware", "float32"), ("offloaded", "float16")]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("precision-aware", "bfloat16"),
        ("offloaded", "bfloat16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_masters_elsewhere(writers: RankPool, tmp_path: Path, kind: str, dtype: str) -> None:
    """In float32 an offloaded optimizer is refused (tests/test_performance.py)."""
    save_model(tmp_path / "model", "qwen2_tied")
    for found in writers.run(differing, 2, str(tmp_path / "model"), str(tmp_path), kind, dtype):
        assert [claim for claim, holds in found.items() if not holds] == []


def saved_while_stepped(rank: int, init: str, path: str, folder: str, kind: str) -> dict[str, bool]:
    """Each claim, of a save whose writers wait until the next step is over. The optimizer's tensors
    lie in memory that a fork shares, as pinned memory may."""
    layout = parallel_layout.join(LAYOUT, rank, init, seed=1, timeout_s=60)
    run = Run(path, layout, "bfloat16", kind).steps(2)
    for state in run.inner.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.untyped_storage().share_memory_()
    if kind == "plain":
        for group in run.inner.param_groups:
            for master in group["params"]:
                master.data.untyped_storage().share_memory_()
    before, moments = run.masters(), run.moments()
    release = hold_children_at("open", re.escape(folder) + r"/__\d_\d\.distcp$")
    save = checkpoint.Saver(layout, writers=2).begin(*run.checkpoint(Path(folder))[:-1])
    waits = not save.written()
    run.steps(3)
    stepped = not same(before, run.masters())
    release()
    save.finish()
    after = Run(path, layout, "bfloat16", kind).steps(1)
    checkpoint.load(*after.checkpoint(Path(folder)))
    parallel_layout.leave()
    return {
        "its writers wait": waits,
        "the step moves the masters": stepped,
        "masters are of its moment": same(before, after.masters()),
        "moments are of its moment": same(moments, after.moments()),
        "count": read_step(after.inner) == 2,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "offloaded"])
def test_a_save_of_memory_that_a_fork_shares_is_of_one_step(
    writers: RankPool, tmp_path: Path, kind: str
) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "saved").mkdir()
    for found in writers.run(
        saved_while_stepped, 2, str(tmp_path / "model"), str(tmp_path / "saved"), kind
    ):
        assert [claim for claim, holds in found.items() if not holds] == []


def numbers() -> Tensor:
    """float32 of all sizes and both signs, with halves between two bfloat16 numbers, above even and
    odd ones."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (4096,), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    halves = (drawn & ~0xFFFF) | 0x8000
    found = torch.cat([drawn, halves]).view(torch.float32)
    return found[found.isfinite() & (found.abs() < 1e38) & (found.abs() > 1e-30)]


def test_parts_of_a_master_are_put_together_again() -> None:
    values = numbers()
    away = (values.view(torch.int32) | 1).view(torch.float32).bfloat16()  # halves away from zero
    rounded, low = parted(values, away)
    assert torch.equal(rounded, away)
    assert torch.equal(joined(rounded, low), values)
    # between 1 and its next
    half = torch.tensor([0x3F808000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    rounded, low = parted(half, half.bfloat16())  # which torch rounds to even, and so towards zero
    assert rounded.tolist() == [1.0, -1.0] and low.tolist() == [0x7FFF, 0x7FFF]
    assert torch.equal(joined(rounded, low), torch.nextafter(half, torch.zeros(2)))


def test_a_parameter_that_ranks_hold_stays_as_they_hold_it() -> None:
    """Whatever rounded it, what is read back is the master within its last bit."""
    values = numbers()
    parameter, state = (
        values.bfloat16(),
        {"master_param": torch.zeros(len(values), dtype=torch.int16)},
    )
    held = parameter.clone()
    write_master(parameter, state, values)
    assert torch.equal(parameter, held)
    again = read_master(parameter, state)
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(again[~ties], values[~ties])
    assert torch.all((again.view(torch.int32) - values.view(torch.int32)).abs() <= 1)
