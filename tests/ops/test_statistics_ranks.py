"""Statistics and STARE's weights of a batch in any split over one to four ranks: those of one
process.

Hypothesis draws the batches, degenerate ones among them; all of them go to the ranks in one call,
because a process group costs more than an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_stare.algorithms.stare import Stare
from megatron_stare.ops.statistics_executor import answer, gather_statistics, kth_largest
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import (
    Count,
    Interpolation,
    Max,
    Mean,
    Quantile,
    Request,
    SegmentSum,
    Statistics,
    Sum,
    Threshold,
    TopK,
)

RANKS, EXAMPLES, SEGMENTS = 4, 150, 5
INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True)
class Example:
    """A batch of n tokens, what is asked of it, and which rank holds which token."""

    surprisal: list[float]
    advantage: list[float]
    entropy: list[float]
    mask: list[bool]
    owner: list[int]
    world: int
    share: float
    count: int
    q: float
    first_index: int

    def batch(self) -> TokenBatch:
        n = len(self.surprisal)
        log_prob = -torch.tensor(self.surprisal, dtype=torch.float32)
        return TokenBatch(
            log_prob=log_prob,
            old_log_prob=log_prob,
            rollout_log_prob=log_prob,
            entropy=torch.tensor(self.entropy, dtype=torch.float32),
            advantage=torch.tensor(self.advantage, dtype=torch.float32),
            loss_mask=torch.tensor(self.mask, dtype=torch.bool),
            sequence=torch.arange(n) % SEGMENTS,
            position=torch.arange(n),
            index=self.first_index + torch.arange(n),
            num_sequences=SEGMENTS,
        )

    def held_by(self, rank: int) -> Tensor:
        """[n of this rank] rows of the batch."""
        return (torch.tensor(self.owner, dtype=torch.int64) == rank).nonzero().squeeze(1)


def tokens(n: int, *kinds: st.SearchStrategy) -> st.SearchStrategy:
    """n values, drawn from one kind all of them; so degenerate batches are as common as mixed
    ones."""
    return st.one_of(*(st.lists(kind, min_size=n, max_size=n) for kind in kinds))


@st.composite
def examples(draw: st.DrawFn) -> Example:
    world = draw(st.integers(1, RANKS))
    n = draw(st.integers(2, 40) | st.sampled_from([0, 1]))
    surprisals = tokens(
        n,
        st.floats(0, width=32, allow_nan=False),  # infinite ones too
        st.sampled_from([0.0, -0.0]),
        st.just(draw(st.sampled_from([0.0, 0.6931472, 1e38]))),  # all equal
        st.sampled_from([0.0, -0.0, 1e-45, 1.0, 1.0, 2.5, 3.4028235e38, float("inf")]),
    )
    return Example(
        surprisal=draw(surprisals),
        # right, wrong, all groups alike, mixed
        advantage=draw(
            tokens(n, st.just(1.0), st.just(-1.0), st.just(0.0), st.sampled_from([-1.5, 0.0, 0.7]))
        ),
        # multiples of 1/64, whose sums are exact: a mean that is the target must be it in every
        # split
        entropy=draw(tokens(n, st.integers(0, 255).map(lambda i: i / 64))),
        mask=draw(tokens(n, st.just(True), st.booleans(), st.just(False))),
        # the second leaves ranks empty
        owner=draw(tokens(n, st.integers(0, world - 1), st.just(world - 1))),
        world=world,
        share=draw(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(0, 1)),
        count=draw(st.sampled_from([0, n]) | st.integers(0, n + 2)),
        q=draw(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1)),
        first_index=draw(st.sampled_from([0, 2**32 - 1 - n])),
    )


def drawn(number: int) -> list[Example]:
    found: list[Example] = []
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]

    @settings(
        max_examples=number, phases=[Phase.generate], database=None, suppress_health_check=quiet
    )
    @given(examples())
    def collect(example: Example) -> None:
        found.append(example)

    collect()
    return found


def asked(batch: TokenBatch, example: Example) -> dict[str, Request]:
    x, mask = batch.surprisal, batch.loss_mask
    quantiles = {
        f"quantile {how}": Quantile(x, mask, example.q, how) for how in get_args(Interpolation)
    }
    return {
        "top": TopK(x, batch.index, mask, example.share),
        "lowest": TopK(-x, batch.index, mask, count=torch.tensor(example.count)),
        **quantiles,
        "max": Max(-x, mask),
        "count": Count(mask),
        "mean": Mean(-x, mask),
        "sum": Sum(x, mask),
        "exact mean": Mean(-x, mask, exact=True),
        "exact sum": Sum(batch.advantage * batch.entropy / 3, mask, exact=True),
        "segments": SegmentSum(x, batch.sequence, SEGMENTS, mask),
    }


def measured(
    example: Example, batch: TokenBatch, group: ProcessGroup | None
) -> tuple[Statistics, Tensor]:
    """The answers to everything that can be asked, and the weights [methods, N] of these tokens by
    STARE's variants."""
    answers = answer(asked(batch, example), group)
    share, weights = example.share, []
    for method in (
        Stare(variant="C2", share=share, entropy_target=2.0, adaptive=True, amplify=1.2),
        Stare(variant="C3", share=share, entropy_target=None),
        Stare(variant="C1", common="bottom", share=share, entropy_target=None),
        Stare(variant="C4", rare_below=0.3, gate="token", entropy_target=1.0),
    ):
        statistics = gather_statistics(lambda known, m=method: m.requests(batch, known), group)
        before = {
            name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
        }
        weights.append(method.weights(batch, statistics, method.control(before, statistics)))
    return answers, torch.stack(weights)


def _parts(
    rank: int, init: str, world: int, batches: list[Example]
) -> list[tuple[Statistics, Tensor] | None]:
    """This rank's findings for every example; None where it has no part in it."""
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    found = []
    for example in batches:
        here = rank < example.world
        part = example.batch().select(example.held_by(rank))
        found.append(measured(example, part, groups[example.world]) if here else None)
    dist.destroy_process_group()
    return found


@pytest.mark.wide
@pytest.mark.distributed
def test_any_split_gives_the_answers_of_one_process(ranks) -> None:
    batches = drawn(EXAMPLES)
    assert {example.world for example in batches} == {1, 2, 3, 4}
    parts = ranks.run(_parts, RANKS, RANKS, batches)
    for number, example in enumerate(batches):
        batch = example.batch()
        want, weights = measured(example, batch, None)
        together = torch.full_like(weights, float("nan"))
        for rank in range(example.world):
            got, together[:, example.held_by(rank)] = parts[rank][number]
            for name, right in want.items():
                equal = same if name not in ("mean", "sum", "segments") else close
                assert equal(got[name], right), (name, got[name], right, rank, example)
        assert torch.equal(together, weights), example


def same(got: Tensor | Threshold, want: Tensor | Threshold) -> bool:
    """Bit for bit; NaN is NaN."""
    if isinstance(want, Threshold):
        fields = ("key", "k", "n", "value")
        return isinstance(got, Threshold) and all(
            same(getattr(got, each), getattr(want, each)) for each in fields
        )
    return (
        isinstance(got, Tensor)
        and got.dtype == want.dtype
        and np.array_equal(got, want, equal_nan=True)
    )


def close(got: Tensor, want: Tensor) -> bool:
    """Float64 sums in another order; of surprisals, which are positive, so that nothing cancels."""
    return torch.allclose(got, want, rtol=1e-12, atol=0.0, equal_nan=True)


keys = st.integers(INT64.min, INT64.max - 1) | st.sampled_from([INT64.min, -1, 0, 1, INT64.max - 1])


@settings(max_examples=200)
@given(
    data=st.data(),
    rows=st.lists(st.lists(st.tuples(keys, st.booleans()), max_size=40), min_size=1, max_size=4),
)
def test_the_select_equals_sorting(data: st.DataObject, rows: list[list[tuple[int, bool]]]) -> None:
    """Keys of all 64 bits, several selects at once, any k from none to all."""
    unique = [list(dict.fromkeys(row)) for row in rows]
    values = [torch.tensor([key for key, _ in row], dtype=torch.int64) for row in unique]
    masks = [torch.tensor([flag for _, flag in row], dtype=torch.bool) for row in unique]
    k = [data.draw(st.integers(0, int(mask.sum()))) for mask in masks]
    found = kth_largest(values, masks, torch.tensor(k), None)
    for row, (x, mask) in enumerate(zip(values, masks, strict=True)):
        largest_first = np.sort(x[mask].numpy())[::-1]
        assert int(found[row]) == (largest_first[k[row] - 1] if k[row] else INT64.max)
