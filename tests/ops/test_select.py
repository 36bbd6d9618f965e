"""The distributed select against sorting, over shapes, ties, signs and ranks."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_stare.ops import statistics_executor
from megatron_stare.ops.statistics_executor import answer, gather_statistics
from megatron_stare.records.batch_statistics import (
    Count,
    Interpolation,
    Max,
    Mean,
    Quantile,
    SegmentSum,
    Sum,
    Threshold,
    TopK,
    ordering_key,
    scalar,
    tensor,
    threshold,
    value_of_key,
)

INTERPOLATIONS = get_args(Interpolation)

floats = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5])


def expected(x: Tensor, mask: Tensor, k: int) -> set[int]:
    """The k masked positions of largest x, the lower index first among equals."""
    candidates = sorted((i for i in range(len(x)) if mask[i]), key=lambda i: (-float(x[i]), i))
    return set(candidates[:k])


def chosen(threshold: Threshold, x: Tensor, index: Tensor, mask: Tensor) -> set[int]:
    return set(index[threshold.select(x, index, mask)].tolist())


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(floats, st.booleans()), min_size=0, max_size=40), share=st.floats(0, 1)
)
def test_one_rank_equals_sorting(rows: list[tuple[float, bool]], share: float) -> None:
    x = torch.tensor([value for value, _ in rows], dtype=torch.float32)
    mask = torch.tensor([flag for _, flag in rows], dtype=torch.bool)
    index = torch.arange(len(rows))
    threshold = answer({"t": TopK(x, index, mask, share)}, None)["t"]
    assert isinstance(threshold, Threshold)
    n = int(mask.sum())
    k = 0 if n == 0 or share <= 0 else min(n, max(1, int(n * share + 0.999999)))
    assert (int(threshold.n), int(threshold.k)) == (n, k)
    want = expected(x + 0.0, mask, k)
    assert chosen(threshold, x, index, mask) == want
    if k:
        assert float(threshold.value) == min(float(x[i]) for i in want)


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(floats.filter(np.isfinite), st.booleans()), min_size=0, max_size=30),
    q=st.floats(0, 1) | st.sampled_from([0.0, 0.2, 0.25, 0.5, 0.75, 0.8, 1.0]),
)
def test_one_rank_quantiles_equal_numpy(rows: list[tuple[float, bool]], q: float) -> None:
    x = torch.tensor([value for value, _ in rows], dtype=torch.float32)
    mask = torch.tensor([flag for _, flag in rows], dtype=torch.bool)
    answers = answer({name: Quantile(x, mask, q, name) for name in INTERPOLATIONS}, None)
    values = x[mask].double().numpy()
    for name in INTERPOLATIONS:
        got = float(scalar(answers, name))
        if len(values) == 0:
            assert np.isnan(got)
            continue
        want = float(np.quantile(values, q, method=name))
        # numpy works from the end for q above half a step, which rounds differently
        assert got == pytest.approx(
            want, rel=1e-9, abs=1e-9 * float(np.abs(values).max()) if name == "linear" else 0
        )


def test_a_count_may_stand_in_for_a_share() -> None:
    x, index, mask = (
        torch.tensor([3.0, 1.0, 2.0, 5.0]),
        torch.arange(4),
        torch.tensor([True, True, True, False]),
    )
    for count, want in ((0, set()), (2, {0, 2}), (9, {0, 1, 2})):
        top = threshold(
            answer({"t": TopK(x, index, mask, count=torch.tensor(float(count)))}, None), "t"
        )
        assert chosen(top, x, index, mask) == want


def test_sums_by_segment() -> None:
    x = torch.tensor([1.0, 2.0, float("nan"), 4.0, 8.0])
    segment, mask = torch.tensor([0, 2, 0, 2, 3]), torch.tensor([True, True, False, True, True])
    answers = answer(
        {"a": SegmentSum(x, segment, 5, mask), "b": SegmentSum(x, segment, 4, ~mask & ~x.isnan())},
        None,
    )
    assert tensor(answers, "a").tolist() == [1.0, 0.0, 6.0, 8.0, 0.0]
    assert tensor(answers, "b").tolist() == [0.0] * 4


@given(st.lists(floats, min_size=2, max_size=2), st.integers(0, 2**32 - 1))
def test_ordering_key_orders_like_the_floats(pair: list[float], index: int) -> None:
    x = torch.tensor(pair, dtype=torch.float32)
    low, high = ordering_key(x, torch.tensor([index, index])).tolist()
    assert (low < high) == bool(x[0] < x[1])
    assert (low == high) == bool(x[0] == x[1])
    assert torch.equal(value_of_key(torch.tensor([low, high])), x + 0.0)


def shared_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 12, (97,), generator=generator).float() / 4 - 1  # many ties
    mask = torch.rand(97, generator=generator) < 0.7
    owner = torch.randint(0, 3, (97,), generator=generator)  # of four ranks the last holds nothing
    return x, mask, owner


def _part(
    rank: int, init: str, world: int, seed: int, share: float
) -> tuple[set[int], dict[str, float], list[float]]:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    x, mask, owner = shared_batch(seed)
    here = owner == rank
    index = torch.arange(97)[here]
    requests = {
        "top": TopK(x[here], index, mask[here], share),
        "other": TopK(-x[here], index, mask[here], 0.5),
        "mean": Mean(x[here], mask[here]),
        "sum": Sum(x[here], mask[here]),
        "max": Max(x[here], mask[here]),
        "count": Count(mask[here]),
        "segments": SegmentSum(x[here], index % 7, 7, mask[here]),
        "none": Quantile(x[here], torch.zeros_like(mask[here]), 0.5),
        **{name: Quantile(x[here], mask[here], share, name) for name in INTERPOLATIONS},
    }
    answers = gather_statistics(lambda known: requests, dist.group.WORLD)
    dist.destroy_process_group()
    top = answers["top"]
    assert isinstance(top, Threshold)
    numbers = {
        name: float(scalar(answers, name))
        for name in ("mean", "sum", "max", "count", "none", *INTERPOLATIONS)
    }
    return chosen(top, x[here], index, mask[here]), numbers, tensor(answers, "segments").tolist()


@pytest.mark.distributed
@pytest.mark.parametrize(("seed", "share"), [(0, 0.1), (1, 0.33), (2, 1.0)])
def test_four_ranks_select_what_one_would(ranks, seed: int, share: float) -> None:
    results = ranks.run(_part, 4, 4, seed, share)
    x, mask, _ = shared_batch(seed)
    n = int(mask.sum())
    k = min(n, max(1, int(n * share + 0.999999)))
    parts = [part for part, _, _ in results]
    assert set().union(*parts) == expected(x, mask, k)
    assert sum(len(part) for part in parts) == k
    sums = [
        float(x[mask & (torch.arange(97) % 7 == segment)].double().sum()) for segment in range(7)
    ]
    for _, numbers, segments in results:
        assert segments == pytest.approx(sums, abs=1e-12)
        assert np.isnan(numbers["none"])
        for name in INTERPOLATIONS:
            want = np.quantile(x[mask].double().numpy(), share, method=name)
            assert numbers[name] == pytest.approx(float(want), abs=1e-12)
        assert numbers["count"] == n
        assert numbers["mean"] == pytest.approx(float(x[mask].double().mean()), abs=1e-12)
        assert numbers["sum"] == pytest.approx(float(x[mask].double().sum()), abs=1e-12)
        assert numbers["max"] == float(x[mask].max())


def test_what_a_select_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six histograms of 11 bits, the last of 9, with a bucket more at each end: 16 KB a round,
    whatever the batch."""
    sent: list[int] = []
    monkeypatch.setattr(
        statistics_executor, "all_reduce", lambda histogram, group: sent.append(histogram.numel())
    )
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**62), 2**62, (1000,), generator=generator)
    found = statistics_executor.kth_largest(
        [keys], [torch.ones(1000, dtype=torch.bool)], torch.tensor([10]), object()
    )  # type: ignore[arg-type]
    assert int(found) == int(keys.sort(descending=True).values[9])
    assert sent == [2**11 + 2] * 5 + [2**9 + 2]


def test_a_method_that_never_stops_asking_is_stopped() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="still asking"):
        gather_statistics(lambda known: {f"again{len(known)}": Count(mask)}, None)
