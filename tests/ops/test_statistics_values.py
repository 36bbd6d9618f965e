"""Every statistic against numpy in float64; what is masked holds numbers that would show."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_stare.ops.statistics_executor import answer
from megatron_stare.records.batch_statistics import (
    Count,
    Max,
    Mean,
    Quantile,
    SegmentSum,
    Sum,
    Threshold,
    TopK,
)

N, SEGMENTS = 60, 4


@pytest.mark.parametrize("hidden", [1e6, torch.inf, torch.nan])
def test_only_masked_positions_count(hidden: float) -> None:
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(N, generator=generator) < 0.6
    segment = torch.randint(0, SEGMENTS, (N,), generator=generator)
    x = torch.where(mask, torch.randn(N, generator=generator), hidden)
    kept, of = x[mask].double().numpy(), segment[mask].numpy()
    found = answer(
        {
            "mean": Mean(x, mask),
            "sum": Sum(x, mask),
            "max": Max(x, mask),
            "count": Count(mask),
            "segments": SegmentSum(x, segment, SEGMENTS, mask),
            "share": TopK(x, torch.arange(N), mask, 0.2),
            "number": TopK(-x, torch.arange(N), mask, count=torch.tensor(5)),
            **{f"{q}": Quantile(x, mask, q) for q in (0.0, 0.3, 0.77, 1.0)},
        },
        None,
    )
    assert float(found["mean"]) == pytest.approx(kept.mean())
    assert float(found["sum"]) == pytest.approx(kept.sum())
    assert float(found["max"]) == kept.max()
    assert int(found["count"]) == len(kept)
    sums = [kept[of == number].sum() for number in range(SEGMENTS)]
    assert found["segments"].tolist() == pytest.approx(sums)
    for q in (0.0, 0.3, 0.77, 1.0):
        assert float(found[f"{q}"]) == pytest.approx(np.quantile(kept, q))
    for name, k, ordered in (
        ("share", int(np.ceil(0.2 * len(kept))), np.sort(kept)),
        ("number", 5, np.sort(-kept)),
    ):
        threshold = found[name]
        assert isinstance(threshold, Threshold)
        assert (int(threshold.k), int(threshold.n)) == (k, len(kept))
        assert float(threshold.value) == ordered[-k]


@pytest.mark.parametrize("spread", [0.1, 20.0])
def test_an_exact_sum_has_the_bits_of_the_true_sum_in_any_order(spread: float) -> None:
    """Also of values of any size, of both signs."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5000, generator=generator)
    x = (x * (spread * torch.randn(5000, generator=generator)).exp()).clamp(-1e10, 1e10)
    mask = torch.rand(5000, generator=generator) < 0.8
    asked = {"sum": Sum(x, mask, exact=True), "mean": Mean(x, mask, exact=True)}
    wanted = math.fsum(x[mask].tolist())
    found = answer(asked, None)
    assert float(found["sum"]) == pytest.approx(wanted, rel=1e-15)
    assert float(found["mean"]) == float(found["sum"]) / int(mask.sum())
    for _ in range(5):
        order = torch.randperm(5000, generator=generator)
        again = answer({"sum": Sum(x[order], mask[order], exact=True)}, None)
        assert float(again["sum"]) == float(found["sum"])


@pytest.mark.parametrize("large", [1e20, torch.inf, -torch.inf, torch.nan])
def test_an_exact_sum_of_a_value_beyond_its_units(large: float) -> None:
    x, mask = torch.tensor([1.0, large, 2.0]), torch.ones(3, dtype=torch.bool)
    found = float(answer({"sum": Sum(x, mask, exact=True)}, None)["sum"])
    assert found == pytest.approx(float(x.double().sum()), nan_ok=True)
