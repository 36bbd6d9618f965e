"""Statistics by micro-batch: what each selects is its own, what the loss divides by is
everyone's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.token_batches import ask, by_sequence, state_of, token_batch

from megatron_stare.algorithms.method import Method
from megatron_stare.config.load import build_method
from megatron_stare.ops.micro_batch_scope import gather_by_micro_batch, summary
from megatron_stare.records.batch_statistics import Threshold, scalar, tensor, threshold

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [
        *({"name": name} for name in ("stare", "stapo", "twenty_entropy", "clip_cov", "kl_cov")),
        {"name": "steer"},
        {"name": "opefo"},
        {"name": "clip_b", "mu": 0.5},
        {"name": "clip_v", "mu": 0.3, "max_share": 0.1},
        {"name": "stare", "variant": "C3", "common": "bottom"},
        {"name": "stare", "variant": "C1", "rare_below": 0.1},
        {"name": "twenty_entropy", "candidates": "all"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_selections_are_those_of_the_micro_batch_alone(settings: dict[str, Any]) -> None:
    method: Method = build_method(settings)
    batch = token_batch(REWARDS, method=method)
    # the last is a dummy
    cut = [batch.select(rows) for rows in (*by_sequence(batch), torch.arange(0))]
    parts = gather_by_micro_batch([partial(method.requests, each) for each in cut], None)
    alone = [ask(method, each) for each in cut]
    for part, own in zip(parts, alone, strict=True):
        assert part.keys() == own.keys()
        for key, value in own.items():
            if key == "tokens":
                continue
            if isinstance(value, Threshold):
                assert vars(threshold(part, key)) == vars(value)
            else:
                assert torch.equal(tensor(part, key).nan_to_num(-1), value.nan_to_num(-1))
        assert scalar(part, "tokens") == sum(scalar(each, "tokens") for each in alone)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("rewards", [[1.0], [1.0, 0.0]])
def test_micro_batch_mean_by_hand(rewards: list[float], n: int) -> None:
    """(b / B) / N of a micro-batch of one response of n tokens."""
    method = build_method({"name": "grpo", "aggregation": "micro_batch_mean"})
    batch = token_batch(rewards, lengths=[n] * len(rewards))
    first = batch.select(torch.arange(n))
    assert method.coefficients(first, ask(method, batch)).tolist() == pytest.approx(
        [1 / len(rewards) / n] * n
    )


def test_the_log_counts_what_micro_batches_selected() -> None:
    method = build_method({"name": "stare", "variant": "C2"})
    batch = token_batch(REWARDS, method=method)
    cut = [batch.select(rows) for rows in by_sequence(batch)]
    parts = gather_by_micro_batch([partial(method.requests, each) for each in cut], None)
    whole = ask(method, batch)
    logged = summary(method.requests(batch, whole), whole, parts, None)
    for side in ("plus", "minus"):
        own = [threshold(part, side) for part in parts]
        assert threshold(logged, side).k == sum(int(each.k) for each in own)
        assert threshold(logged, side).k > threshold(whole, side).k
        values = [float(each.value) for each in own if each.k > 0]
        assert float(threshold(logged, side).value) == pytest.approx(sum(values) / len(values))
    assert logged["entropy"] is whole["entropy"]


def test_the_log_counts_the_complement_of_what_micro_batches_selected() -> None:
    method = build_method({"name": "stare", "variant": "C3"})
    batch = token_batch(REWARDS, method=method)
    cut = [batch.select(rows) for rows in by_sequence(batch)]
    parts = gather_by_micro_batch([partial(method.requests, each) for each in cut], None)
    whole = ask(method, batch)
    logged = method.metrics(
        summary(method.requests(batch, whole), whole, parts, None), state_of(method)
    )
    chosen = [method.selected(each, part) for each, part in zip(cut, parts, strict=True)]
    for name, code in (("common_plus", 2), ("common_minus", -2)):
        number = sum(int((each == code).sum()) for each in chosen)
        assert float(logged[f"stare/selected_{name}"]) == number > 0


@pytest.mark.parametrize("settings", [{"name": "gtpo"}, {"name": "stare", "gate": "sample"}])
def test_sums_by_group_lie_across_micro_batches(settings: dict[str, Any]) -> None:
    method = build_method(settings)
    batch = token_batch(REWARDS, method=method)
    cut = [batch.select(rows) for rows in by_sequence(batch)]
    whole = ask(method, batch)
    assert {"gtpo/d", "gate/entropy"} & whole.keys()
    for part in gather_by_micro_batch([partial(method.requests, each) for each in cut], None):
        for key in whole.keys() - {"entropy", "plus"}:  # which are a micro-batch's own
            torch.testing.assert_close(tensor(part, key), tensor(whole, key), msg=key)
