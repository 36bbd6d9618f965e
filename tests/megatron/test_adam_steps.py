"""A resumed run continues bit for bit whatever Adam there is, wherever it keeps the number of its
steps."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from support.adams import ADAMS, installed
from support.models import save_model
from support.ranks import RankPool
from torch import Tensor

from megatron_stare.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_stare.megatron.backend import layout as parallel_layout
from megatron_stare.megatron.backend.cpu_backend import backend, substituted
from megatron_stare.megatron.checkpoint import checkpoint
from megatron_stare.megatron.model.model import build_policy, load_hf, named_parameters, unwrap
from megatron_stare.megatron.optimizer.distributed_optimizer import boxes
from megatron_stare.megatron.optimizer.optimizer import build_optimizer, take_step
from megatron_stare.megatron.optimizer.optimizer_state import (
    adam_name,
    read_step,
    step_place,
    write_step,
)
from megatron_stare.models import read_shape
from megatron_stare.weights.files.hf_folder import HfFolder

LAYOUT = ParallelConfig(data=2)
# of parameters, and whether distributed
KINDS = list(itertools.product(["float32", "bfloat16"], [False, True]))
SAVED = {"float32": (0, 3), "bfloat16": (3,)}  # steps after which there is a checkpoint
STEPS = 5


class Run:
    """A policy and its optimizer, with gradients drawn from the number of the step."""

    def __init__(
        self, path: str, layout: parallel_layout.Layout, dtype: str, distributed: bool
    ) -> None:
        shape = read_shape(path)
        self.layout = layout
        self.model = build_policy(
            shape, ModelConfig(path=path, dtype=dtype), LAYOUT, layout, distributed
        )
        load_hf(self.model, HfFolder(path), shape, layout)
        # large moments and a decay that shows: a bias correction that begins anew moves weights
        # twice as far
        config = OptimizerConfig(lr=0.05, weight_decay=0.1, distributed=distributed)
        self.optimizer, self.scheduler = build_optimizer(self.model, config, dtype, steps=STEPS)
        self.done = 0

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def steps(self, until: int) -> None:
        for number in range(self.done, until):
            generator = torch.Generator().manual_seed(number)
            self.optimizer.zero_grad()
            for _, parameter in named_parameters(self.model):
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
            assert take_step(
                self.optimizer, self.scheduler, 1e9, empty=None, loss_not_finite=None
            ).taken
        self.done = until

    def checkpoint(self, folder: Path) -> tuple[Any, ...]:
        return str(folder), self.model, self.optimizer, self.scheduler, self.layout

    def weights(self) -> dict[str, Tensor]:
        """Weights of the model, and the float32 masters held here."""
        masters = [p for group in self.inner.param_groups for p in group["params"]]
        found = {name: p.detach().clone() for name, p in named_parameters(self.model)}
        return found | {f"master {i}": p.detach().clone() for i, p in enumerate(masters)}


def resumed_and_not(
    rank: int, init: str, path: str, folder: str, adam: str
) -> list[tuple[str, bool, Any]]:
    """For every kind: whether each resumed run's weights are those of the one that went on, and
    what was read."""
    layout = parallel_layout.join(LAYOUT, rank, init, seed=1, timeout_s=60)
    found = []
    with installed(ADAMS[adam]):
        for dtype, distributed in KINDS:
            whole = Run(path, layout, dtype, distributed)
            at = Path(folder) / f"{dtype}-{distributed}"
            for step in SAVED[dtype]:
                whole.steps(step)
                (at / str(step)).mkdir(parents=True, exist_ok=True)
                torch.distributed.barrier()
                checkpoint.save(*whole.checkpoint(at / str(step)))
            whole.steps(STEPS)
            want = whole.weights()
            for step in SAVED[dtype]:
                cut = Run(path, layout, dtype, distributed)
                checkpoint.load(*cut.checkpoint(at / str(step)))
                cut.done = step
                read = read_step(cut.inner)
                cut.steps(STEPS)
                got = cut.weights()
                equal = got.keys() == want.keys() and all(
                    torch.equal(got[name], want[name]) for name in want
                )
                found.append(
                    (f"{dtype} {distributed} {step} read {read}", equal, read_step(cut.inner))
                )
    parallel_layout.leave()
    return found


@pytest.mark.wide
@pytest.mark.distributed
@pytest.mark.parametrize("adam", ADAMS)
def test_the_step_survives_a_resume(writers: RankPool, tmp_path: Path, adam: str) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    counts = adam != "absent"
    for found in writers.run(resumed_and_not, 2, str(tmp_path / "model"), str(tmp_path), adam):
        assert len(found) == sum(len(SAVED[dtype]) for dtype, _ in KINDS)
        for what, equal, last in found:
            assert equal, what
            assert last == (STEPS if counts else None), what


def saved_by_one_and_loaded_by_another(
    rank: int, init: str, path: str, folder: str
) -> list[int | None]:
    layout = parallel_layout.join(LAYOUT, rank, init, seed=1, timeout_s=60)
    with installed(ADAMS["tensor_in_state"]):
        before = Run(path, layout, "float32", True)
        before.steps(3)
        checkpoint.save(*before.checkpoint(Path(folder)))
    read = []
    for adam in ADAMS:
        with installed(ADAMS[adam]):
            after = Run(path, layout, "float32", True)
            checkpoint.load(*after.checkpoint(Path(folder)))
            after.steps(1)
            read.append(read_step(after.inner))
    parallel_layout.leave()
    return read


@pytest.mark.distributed
def test_an_adam_that_was_installed_since_goes_on_counting(
    writers: RankPool, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    (tmp_path / "saved").mkdir()
    want = [None if adam == "absent" else 4 for adam in ADAMS]
    found = writers.run(
        saved_by_one_and_loaded_by_another, 2, str(tmp_path / "model"), str(tmp_path / "saved")
    )
    assert found == [want, want]


def loaded_from_megatrons_own_form(rank: int, init: str, path: str, folder: str) -> bool:
    """Checks that a run goes on from what Megatron itself gathers and saves, as earlier releases
    had it do."""
    layout = parallel_layout.join(LAYOUT, rank, init, seed=1, timeout_s=60)
    whole, cut = (Run(path, layout, "float32", True) for _ in range(2))
    whole.steps(3)
    checkpoint.save(*whole.checkpoint(Path(folder) / "ours"))
    with backend():
        parameters = {
            f"model{i}": unwrap(chunk).sharded_state_dict() for i, chunk in enumerate(whole.model)
        }
        (part,) = whole.optimizer.chained_optimizers
        form = {"distrib_optim_sharding_type": "fully_reshardable"}
        gathered = part.sharded_state_dict(parameters, metadata=form)["param_state"]
        common = dist_checkpointing.load_common_state_dict(str(Path(folder) / "ours"))
        random = ShardedObject("random", None, (2,), (rank,))
        state = parameters | common | {"moments": gathered, "random": random}
        with substituted(filesystem_async, "_results_queue", queue.SimpleQueue()):
            dist_checkpointing.save(state, str(Path(folder) / "theirs"))
    whole.steps(STEPS)
    with substituted(checkpoint, "_set_random_states", lambda _: None):
        checkpoint.load(*cut.checkpoint(Path(folder) / "theirs"))
    cut.done = 3
    cut.steps(STEPS)
    want, got = whole.weights(), cut.weights()
    parallel_layout.leave()
    return all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.distributed
def test_moments_that_megatron_gathered_are_read(writers: RankPool, tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen2_tied")
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    assert writers.run(
        loaded_from_megatrons_own_form, 2, str(tmp_path / "model"), str(tmp_path)
    ) == [True, True]


@pytest.mark.parametrize("adam", ADAMS)
def test_looking_for_the_place_changes_nothing(adam: str) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = ADAMS[adam]([p], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    groups = optimizer.param_groups
    for taken in range(3):
        before = (
            p.detach().clone(),
            read_step(optimizer),
            {key: repr(x) for key, x in groups[0].items()},
        )
        place = step_place(optimizer)
        assert optimizer.param_groups is groups
        assert list(optimizer.state) == ([p] if taken else [])
        after = (
            p.detach().clone(),
            read_step(optimizer),
            {key: repr(x) for key, x in groups[0].items()},
        )
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        p.grad = torch.ones(3)
        optimizer.step()
    kept = {"in_group": "group", "late": "group", "absent": None}.get(adam, "state")
    assert [name for name in ("group", "state") if getattr(place, name) is not None] == (
        [kept] if kept else []
    )


def test_parameters_share_no_step() -> None:
    """One tensor for all would be counted up once a parameter."""
    ones = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(ones, lr=0.1)
    write_step(optimizer, step_place(optimizer), 7)
    assert len({optimizer.state[p]["step"].data_ptr() for p in ones}) == 3
    optimizer.state[ones[0]]["step"] += 1
    with pytest.raises(ValueError, match=r"different numbers of steps: \[7, 8\]"):
        read_step(optimizer)


def test_whose_adam_it_is() -> None:
    p = [torch.nn.Parameter(torch.ones(2))]
    assert adam_name(torch.optim.AdamW(p)) == "AdamW of torch"
    late = ADAMS["late"](p, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert adam_name(late) == "Late of support"


def _elements(
    shape: tuple[int, ...], cut: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[int]:
    numbers = torch.arange(prod(shape)).view(shape)
    for at, size in cut:
        yield from (
            numbers[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))]
            .flatten()
            .tolist()
        )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_boxes_are_the_stretch_in_order(sizes: list[int], data: st.DataObject) -> None:
    shape = tuple(sizes)
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    cut = list(boxes(shape, start, stop))
    assert list(_elements(shape, cut)) == list(range(start, stop))
    assert len(cut) <= max(1, 2 * len(shape) - 1)
    assert all(prod(size) > 0 for _, size in cut)
