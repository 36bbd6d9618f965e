"""Differences of engine minus trainer are summarised as by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_stare.megatron.step.differences import UNLIKELY, Compared
from megatron_stare.records.log_prob_difference import Sizes

NAN = math.nan


def test_every_kind_of_token_by_hand() -> None:
    """Six tokens, of which the engine gave no number for two; a seventh was compared by no rank."""
    found = Compared(
        values=torch.tensor([0.5, -0.25, NAN, 0.125, -2.0, NAN]),
        positions=torch.tensor([0, 1, 7, 8, 600, 0]),
        longest=torch.tensor([True, True, True, False, False, False]),
        unlikely=torch.tensor([False, True, False, False, True, True]),
        versions=torch.tensor([3, 3, 3, 4, 4, 4]),
        all_versions=[3, 4, 5],
        expected=7,
    ).summary(None)
    assert found.everywhere == Sizes(6, 3, 2.0, 2.875 / 4)
    assert math.isnan(found.lowest)
    assert found.longest == Sizes(3, 1, 0.5, 0.375)
    assert found.likely == Sizes(3, 1, 0.5, 0.3125)
    assert found.unlikely == Sizes(3, 1, 2.0, 1.125)
    assert found.from_position == {
        0: Sizes(2, 1, 0.5, 0.5),
        1: Sizes(2, 1, 0.25, 0.25),
        8: Sizes(1, 0, 0.125, 0.125),
        512: Sizes(1, 0, 2.0, 2.0),
    }
    assert found.of_version == {3: Sizes(3, 1, 0.5, 0.375), 4: Sizes(3, 1, 2.0, 1.0625)}


def test_quantiles_of_the_sizes_and_the_lowest_difference() -> None:
    values = torch.randn(2001, generator=torch.Generator().manual_seed(0))
    yes, zeros = torch.ones(2001, dtype=torch.bool), torch.zeros(2001, dtype=torch.int64)
    found = Compared(values, zeros, ~yes, ~yes, zeros, [0], 2001).summary(None)
    sizes = values.abs().numpy()
    assert found.quantiles == {
        name: pytest.approx(float(np.quantile(sizes, q, method="nearest")), rel=1e-6)
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999))
    }
    assert found.lowest == pytest.approx(float(values.min()))
    assert found.longest == Sizes(0, 0, 0.0, 0.0)  # of nothing


def test_of_several_longest_responses_the_first_is_the_longest() -> None:
    share = SimpleNamespace(
        response_lengths=torch.tensor([1, 2, 2]),
        weight_versions=torch.tensor([8, 9, 9, 9, 9]),
        loss_lengths=torch.tensor([1, 2, 2]),
    )
    batch = SimpleNamespace(
        share=share,
        position=torch.tensor([0, 0, 1, 0, 1]),
        sequence=torch.tensor([0, 1, 1, 2, 2]),
        held=torch.arange(5),
    )
    trainer = torch.tensor([UNLIKELY - 0.01, UNLIKELY + 0.01, -0.1, -0.1, -0.1])
    found = Compared.of(batch, torch.zeros(5), trainer, [8, 9])  # type: ignore[arg-type]
    assert found.longest.tolist() == [False, True, True, False, False]
    assert found.unlikely.tolist() == [True, False, False, False, False]
    assert (found.versions.tolist(), found.expected) == ([8, 9, 9, 9, 9], 5)
    torch.testing.assert_close(found.values, -trainer)
