"""The selector agrees with an independent float64 reference, in any split over ranks, and refuses
what it cannot select from."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from megatron_stare.errors import ConfigError, DataError
from megatron_stare.select import Selector
from megatron_stare.select.reference import reference

SETTINGS: list[dict[str, Any]] = [
    {},
    {"variant": "C2", "adaptive": True, "entropy_target": 0.25},
    {"variant": "C3", "gate": "sample"},
    {"variant": "C1", "common": "bottom", "gate": "token"},
    {"variant": "C4", "rare_below": 0.3, "entropy_target": None},
    {"share": 0.0},
]


def drawn(updates: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Batches with many equal surprisals, NaN where the mask is false."""
    source = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(updates):
        mask = torch.rand(6, 9, generator=source) > 0.3
        log_probs = -(torch.rand(6, 9, generator=source) * 8).round() / 4
        batches.append(
            {
                "log_probs": log_probs.masked_fill(~mask, torch.nan),
                "entropies": torch.rand(6, 9, generator=source) * 0.6,
                "advantages": torch.randn(6, generator=source),
                "mask": mask,
            }
        )
    return batches


def in_numpy(batches: list[dict[str, torch.Tensor]]) -> list[dict[str, np.ndarray]]:
    return [{name: value.numpy() for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_agrees_with_the_reference_over_several_updates(settings: dict[str, Any]) -> None:
    selector, batches = Selector("stare", **settings), drawn(5)
    for batch, expected in zip(batches, reference(in_numpy(batches), settings), strict=True):
        found = selector.update(**batch)
        np.testing.assert_array_equal(found.codes, expected["codes"])
        np.testing.assert_allclose(found.weights, expected["weights"], rtol=1e-6)
        torch.testing.assert_close(
            found.advantages,
            torch.where(batch["mask"], batch["advantages"][:, None] * found.weights, 0.0),
            rtol=0,
            atol=0,
        )
        assert selector.state_dict()["state"] == pytest.approx(
            {name: expected[name] for name in ("gate", "amplify", "attenuate")}
        )


@pytest.mark.parametrize("sign", [1, -1, 0])
def test_an_empty_side_selects_nothing(sign: int) -> None:
    (batch,) = drawn(1)
    batch["advantages"] = sign * batch["advantages"].abs()
    codes = Selector("stare", variant="C2").update(**batch).codes
    assert set(codes.unique().tolist()) == {0, sign}


def test_permuted_rows_take_their_selection_with_them() -> None:
    (batch,) = drawn(1)
    batch |= {"log_probs": torch.full((6, 9), -1.0), "advantages": torch.arange(1.0, 7.0)}
    plain = Selector("stare").update(**batch).codes
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    permuted = {name: value[order] for name, value in batch.items()}
    assert torch.equal(Selector("stare").update(**permuted, rows=order).codes, plain[order])
    # without their numbers, ties fall to other tokens: the numbers matter in this batch
    assert not torch.equal(Selector("stare").update(**permuted).codes, plain[order])


def test_flat_input_equals_padded_input() -> None:
    (batch,) = drawn(1)
    mask, rows = batch["mask"], torch.arange(6)[:, None].expand(6, 9)
    flat = {name: batch[name][mask] for name in ("log_probs", "entropies")}
    flat["advantages"] = batch["advantages"][:, None].expand(6, 9)[mask]
    index = (rows * 9 + torch.arange(9))[mask]
    settings = {"variant": "C2", "gate": "sample"}
    found = Selector("stare", **settings).update(
        **flat, mask=torch.ones_like(index, dtype=torch.bool), sequence=rows[mask], index=index
    )
    padded = Selector("stare", **settings).update(**batch)
    assert torch.equal(found.codes, padded.codes[mask])
    assert torch.equal(found.weights, padded.weights[mask])


@pytest.mark.parametrize("index", [-1, 2**32])
def test_an_index_that_no_key_can_hold_is_refused(index: int) -> None:
    numbers = torch.tensor([0, index])
    flat = {name: torch.ones(2) for name in ("entropies", "advantages", "mask")}
    with pytest.raises(DataError, match="or an index is 2\\^32 or larger"):
        Selector("stare").update(
            -torch.ones(2), **flat, sequence=torch.zeros(2, dtype=torch.int64), index=numbers
        )


def test_a_negative_row_or_sequence_is_refused_before_any_rank_computes() -> None:
    (batch,) = drawn(1)
    with pytest.raises(DataError, match="a row, a sequence or an index is negative"):
        Selector().update(**batch, rows=torch.tensor([0, 1, 2, 3, 4, -1]))
    flat = {name: torch.ones(2) for name in ("entropies", "advantages", "mask")}
    with pytest.raises(DataError, match="a row, a sequence or an index is negative"):
        Selector("stare").update(
            -torch.ones(2), **flat, sequence=torch.tensor([0, -1]), index=torch.arange(2)
        )


def test_a_resumed_selector_goes_on_alike() -> None:
    settings = {"variant": "C2", "adaptive": True, "entropy_target": 0.29}
    whole, first, batches = Selector(**settings), Selector(**settings), drawn(6)
    states = [whole.update(**each) and whole.state_dict() for each in batches]
    for each in batches[:3]:
        first.update(**each)
    resumed = Selector(**settings)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.state_dict() == states[2]
    assert [resumed.update(**each) and resumed.state_dict() for each in batches[3:]] == states[3:]
    assert len({state["state"]["amplify"] for state in states}) > 2  # the controller moved


def test_stapo_and_twenty_entropy_take_tokens_out() -> None:
    (batch,) = drawn(1)
    found = Selector("twenty_entropy", share=0.2).update(**batch)
    kept = batch["mask"] & (found.weights == 1)
    assert int(kept.sum()) == int(int(batch["mask"].sum()) * 0.2 + 0.9999)
    assert batch["entropies"][kept].min() >= batch["entropies"][batch["mask"] & ~kept].max()
    assert torch.equal(found.counted, kept)
    found = Selector("stapo", tau_p=0.9, denominator="all").update(**batch)
    assert (found.weights == 0).any() and torch.equal(found.counted, batch["mask"])


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("grpo", {}, "method: 'grpo' does not weigh"),
        ("stare", {"shar": 0.1}, "shar: is no setting of stare"),
        ("stare", {"clip_high": 0.3}, "clip_high: belongs to the trainer's loss"),
        ("stare", {"variant": "O9"}, "variant: 'O9' is none of O1"),
        ("stare", {"share": 2}, r"share must lie in \[0, 1\]"),
    ],
)
def test_settings_are_checked(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Selector(method, **settings)


def test_faulty_batches_are_refused() -> None:
    (batch,) = drawn(1)
    with pytest.raises(DataError, match="log_probs or entropies of masked tokens"):
        Selector().update(**batch | {"log_probs": torch.full((6, 9), torch.nan)})
    with pytest.raises(DataError, match="advantages of masked tokens"):
        Selector().update(**batch | {"advantages": torch.full((6,), torch.inf)})
    with pytest.raises(DataError, match="2 rows have the number 3"):
        Selector().update(**batch, rows=torch.tensor([0, 1, 2, 3, 3, 4]))
    with pytest.raises(DataError, match="entropies: has shape"):
        Selector().update(**batch | {"entropies": torch.zeros(6, 8)})
    with pytest.raises(DataError, match="flat input needs"):
        Selector().update(*(torch.zeros(3),) * 4)


def test_a_state_of_other_settings_is_refused() -> None:
    saved = Selector(share=0.2).state_dict()
    with pytest.raises(ConfigError, match=r"share was 0.2, now 0.1"):
        Selector().load_state_dict(saved)
