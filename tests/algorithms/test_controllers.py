"""State moves between steps: the entropy bonus a step late, STARE's gate and weights in time for
the loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.token_batches import token_batch

from megatron_stare.algorithms.entropy_bonus import USED
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.algorithms.stare import Stare
from megatron_stare.config.load import build_method
from megatron_stare.ops.statistics_executor import gather_statistics
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import threshold

REWARDS = [1.0, 0.0, 0.0, 1.0]
NAN = math.nan


def batch_with(value: float, field: str = "entropy") -> TokenBatch:
    """Whose entropies, or surprisals, have this mean over the tokens that carry loss; those without
    lie far off."""
    batch = token_batch(REWARDS)
    batch.loss_mask = batch.sequence != 2
    number = int(batch.loss_mask.sum())
    spread = torch.linspace(-0.1, 0.1, number) if math.isfinite(value) else torch.zeros(number)
    x = torch.full(batch.loss_mask.shape, 50.0)
    x[batch.loss_mask] = value + spread
    other = torch.full_like(x, 7.0)
    batch.entropy = x if field == "entropy" else other
    batch.old_log_prob = -x if field == "surprisal" else -other
    return batch


def run(
    settings: dict[str, Any], entropies: list[float], field: str = "entropy"
) -> list[dict[str, float]]:
    """The state that each of the steps uses."""
    method = build_method(settings)
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }
    states = []
    for value in entropies:
        batch = batch_with(value, field)
        state = method.control(
            state, gather_statistics(lambda known, b=batch: method.requests(b, known), None)
        )
        states.append({name: float(x) for name, x in state.items()})
    return states


@pytest.mark.parametrize("measure", ["entropy", "surprisal"])
def test_a_steered_bonus_acts_one_step_late(measure: str) -> None:
    bonus = {
        "coef": 0.01,
        "target": 1.0,
        "delta": 0.004,
        "coef_min": 0.002,
        "coef_max": 0.013,
        "measure": measure,
    }
    entropies = [0.5, 0.5, 1.5, 1.5, 1.5, 0.5, 0.5]
    states = run({"name": "grpo", "entropy_bonus": bonus}, entropies, measure)
    # c after each step: 0.013 (bounded), 0.013, 0.009, 0.005, 0.002 (bounded), 0.006, 0.010; a step
    # uses the one before it, and only where entropy was below the target then
    assert [state[USED] for state in states] == pytest.approx(
        [0.01, 0.013, 0.013, 0.0, 0.0, 0.0, 0.006]
    )


def test_a_step_without_a_finite_entropy_changes_nothing_of_the_bonus() -> None:
    bonus = {"coef": 0.01, "target": 1.0, "delta": 0.001, "coef_max": 0.02}
    states = run({"name": "grpo", "entropy_bonus": bonus}, [0.5, NAN, NAN, 0.5, 0.5])
    assert [state[USED] for state in states] == pytest.approx([0.01, 0.011, 0.011, 0.011, 0.012])


def test_stare_moves_before_the_loss_of_the_same_step() -> None:
    settings = {
        "name": "stare",
        "entropy_target": 1.0,
        "adaptive": True,
        "adapt_rate": 0.25,
        "amplify": 1.2,
        "amplify_max": 1.6,
        "attenuate": 0.7,
        "attenuate_min": 0.4,
    }
    states = run(settings, [0.5, 0.5, 1.5, 1.5, NAN, 1.5, 0.5])
    assert [state["gate"] for state in states] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [state["amplify"] for state in states] == pytest.approx(
        [1.45, 1.6, 1.35, 1.1, 1.1, 1.0, 1.25]
    )
    assert [state["attenuate"] for state in states] == pytest.approx(
        [0.45, 0.4, 0.65, 0.9, 0.9, 1.0, 0.75]
    )


def test_stare_moves_its_weights_no_further_than_the_papers_bounds() -> None:
    states = run(
        {"name": "stare", "entropy_target": 1.0, "adaptive": True, "adapt_rate": 0.3},
        [0.5, 0.5, 0.5],
    )
    assert [state["amplify"] for state in states] == pytest.approx([1.4, 1.5, 1.5])
    assert [state["attenuate"] for state in states] == pytest.approx([0.6, 0.5, 0.5])


def test_the_gate_of_a_response_of_one_token_is_by_its_entropy() -> None:
    method = build_method({"name": "stare", "gate": "sample", "entropy_target": 1.0})
    assert isinstance(method, Stare)
    batch = token_batch(REWARDS, lengths=[1, 2, 1, 0])
    batch.entropy = torch.tensor([1.5, 0.5, 1.0, 0.9])
    known = gather_statistics(lambda known: method.requests(batch, known), None)
    assert method.gates(batch, known, {}).tolist() == [0.0, 1.0, 1.0, 1.0]


def test_what_is_logged_of_filters_clips_and_selections() -> None:
    method = build_method(
        {"name": "stare", "entropy_target": None, "correction": {"mode": "mask", "low": 0.9}}
    )
    assert isinstance(method, PolicyGradient)
    batch = token_batch([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0], method=method, off_policy=2.0)
    known = gather_statistics(lambda known: method.requests(batch, known), None)
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }
    own = (batch.old_log_prob - batch.rollout_log_prob).exp()
    kept = (own >= 0.9) & (own <= 2.0)
    shares = method.token_loss(batch, known, state).shares
    assert torch.equal(shares["loss/kept"], kept)
    torch.testing.assert_close(shares["correction/weight"], own)
    ratio = (batch.log_prob - batch.old_log_prob).detach().exp()
    dual = (batch.advantage < 0) & (ratio > 10.0)
    clipped = (
        ((batch.advantage > 0) & (ratio > 1.28)) | ((batch.advantage < 0) & (ratio < 0.8)) | dual
    )
    assert torch.equal(shares["loss/clip_fraction"], clipped)
    assert 0 < int(clipped.sum()) < len(clipped)
    metrics = method.metrics(known, state)
    side = kept & (batch.advantage > 0)
    k = math.ceil(0.1 * int(side.sum()))
    rarest = (-batch.old_log_prob[side]).sort(descending=True).values
    assert (float(metrics["loss/tokens"]), float(metrics["stare/selected_plus"])) == (
        float(kept.sum()),
        k,
    )
    assert float(metrics["stare/threshold_plus"]) == float(rarest[k - 1])
    assert int(threshold(known, "plus").n) == int(side.sum())
