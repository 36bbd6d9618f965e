"""Checks that values stored at masked positions change no number of a method.

An environment's own tokens and other rows' tokens stand at masked positions, so a value that leaks
from there would make the loss depend on how a rollout is laid out.
"""

from __future__ import annotations

from dataclasses import astuple, is_dataclass, replace
from typing import Any

import pytest
import torch
from support.token_batches import ask, by_sequence, loss_and_gradient, state_of, token_batch
from test_family import MIXED, built, with_everything
from test_ranks import CASES

from megatron_stare.records.batch import TokenBatch

COLUMNS = (
    "log_prob",
    "old_log_prob",
    "rollout_log_prob",
    "entropy",
    "advantage",
    "current_entropy",
    "reference_log_prob",
    "selection_log_prob",
    "selection_entropy",
)


def masked_batch(method: Any) -> TokenBatch:
    """Eight responses with masked tokens at random places; the last response has no other."""
    batch = token_batch(MIXED, method=method, lengths=[9, 3, 12, 5, 1, 7, 8, 4])
    random = torch.Generator().manual_seed(3)
    mask = torch.rand(len(batch.loss_mask), generator=random) < 0.6
    mask |= batch.position == 0
    mask &= batch.sequence < 7
    lengths = torch.zeros(8, dtype=torch.int64).index_add_(0, batch.sequence, mask.long())
    return replace(
        batch,
        loss_mask=mask,
        sequence_lengths=lengths,
        num_sequences=7,
        # a selection by the current policy reads columns of its own
        selection_log_prob=batch.log_prob.detach().clone(),
        selection_entropy=batch.entropy.flip(0),
    )


def overwritten(batch: TokenBatch, where: torch.Tensor, seed: int) -> TokenBatch:
    """The batch with random values of both signs and of any size in every column at `where`."""
    random = torch.Generator().manual_seed(seed)
    columns = {}
    for name in COLUMNS:
        column = getattr(batch, name).detach()
        other = 5 * torch.randn(column.shape, generator=random)
        columns[name] = torch.where(where, other, column)
    return replace(batch, **columns)


def tensors(value: Any) -> list[Any]:
    """The numbers of a statistic, which may have several."""
    parts = astuple(value) if is_dataclass(value) else (value,)
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in parts]


@pytest.mark.parametrize("make", [built, with_everything])
@pytest.mark.parametrize("case", CASES)
def test_values_at_masked_positions_change_nothing(case: str, make: Any) -> None:
    name, settings = CASES[case]
    method = make(name, **settings)
    batch = masked_batch(method)
    statistics = ask(method, batch)
    state = state_of(method, statistics)
    whole, gradient = loss_and_gradient(method, batch)
    parts, _ = loss_and_gradient(method, batch, by_sequence(batch))
    assert gradient[~batch.loss_mask].abs().max() == 0 and gradient.abs().max() > 0
    for seed in range(3):
        other = overwritten(batch, ~batch.loss_mask, seed)
        found = ask(method, other)
        assert found.keys() == statistics.keys()
        for key, value in statistics.items():
            assert tensors(found[key]) == tensors(value), key
        assert state_of(method, found) == state  # the gate, too
        assert torch.equal(
            torch.where(other.loss_mask, method.selected(other, found), 0),
            torch.where(batch.loss_mask, method.selected(batch, statistics), 0),
        )
        loss, slope = loss_and_gradient(method, other)
        assert torch.equal(loss, whole) and torch.equal(slope, gradient)
        assert torch.equal(loss_and_gradient(method, other, by_sequence(other))[0], parts)


@pytest.mark.parametrize("case", CASES)
def test_values_at_trained_positions_change_the_loss(case: str) -> None:
    # the test above could not fail if the columns that it overwrites were not read
    name, settings = CASES[case]
    method = with_everything(name, **settings)
    batch = masked_batch(method)
    other = overwritten(batch, batch.loss_mask, seed=0)
    assert not torch.equal(loss_and_gradient(method, other)[0], loss_and_gradient(method, batch)[0])
