"""Methods meet the edges: failed verifiers, single responses, gates, clipping, settings out of
range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_stare.algorithms.advantage import group_advantages
from megatron_stare.algorithms.method import Method, State, TokenTerms
from megatron_stare.algorithms.stapo import SpuriousTokens
from megatron_stare.algorithms.surrogate import clip, clipped_surrogate
from megatron_stare.config.load import build_method
from megatron_stare.errors import ConfigError
from megatron_stare.records.batch import TokenBatch
from megatron_stare.records.batch_statistics import Statistics

YES = torch.ones(4, dtype=torch.bool)


def test_a_response_that_was_not_scored_enters_no_moment() -> None:
    rewards = torch.tensor([1.0, 0.0, 7.0, 1.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0])
    counted = torch.tensor([True, True, False, True])
    got = group_advantages(rewards, groups, counted)
    three = group_advantages(rewards[counted], groups[counted], YES[:3])
    assert got[2] == 0
    torch.testing.assert_close(got[counted], three)


def test_equal_rewards_give_no_advantage() -> None:
    got = group_advantages(torch.ones(4, dtype=torch.float64), torch.tensor([0, 0, 1, 1]), YES)
    assert got.abs().max() == 0


def test_equal_rewards_give_exactly_none_whatever_their_mean_rounds_to() -> None:
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert float(rewards.sum() / 3) != 0.1
    for spread in ("sample", "population", "none"):
        assert (
            group_advantages(rewards, torch.zeros(3, dtype=torch.int64), YES[:3], spread=spread)
            .abs()
            .max()
            == 0
        )


def test_a_single_response_keeps_its_reward() -> None:
    got = group_advantages(torch.tensor([2.0], dtype=torch.float64), torch.tensor([0]), YES[:1])
    assert float(got) == pytest.approx(2.0 / (1 + 1e-6))


def test_groups_do_not_mix() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    got = group_advantages(rewards, torch.tensor([0, 1, 0, 1]), YES)
    assert got[0] == got[2] == 0
    assert got[1] < 0 < got[3]


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [(1.0, 2.0, 0.0), (1.0, 1.1, 1.0), (-1.0, 0.5, 0.0), (-1.0, 2.0, 1.0), (-1.0, 20.0, 0.0)],
)
def test_where_the_clip_takes_the_gradient(advantage: float, ratio: float, gradient: float) -> None:
    log_prob = torch.tensor([ratio]).log().requires_grad_()
    out = clipped_surrogate(
        log_prob, torch.zeros(1), torch.tensor([advantage]), low=0.2, high=0.28, dual=10.0
    )
    out.loss.sum().backward()
    assert bool(out.clipped) == (gradient == 0.0)
    assert (log_prob.grad.abs() > 0).item() == (gradient == 1.0)


def test_nothing_is_clipped_at_the_bounds_themselves() -> None:
    for ratio, advantage in ((1.5, 1.0), (0.5, -1.0), (4.0, -1.0), (0.5, 0.0)):
        out = clip(torch.tensor([ratio]), torch.tensor([advantage]), low=0.5, high=0.5, dual=4.0)
        assert out.loss.tolist() == [-ratio * advantage] and out.clipped.tolist() == [False]


def test_below_which_probability_stapo_looks() -> None:
    """0.002, as in the paper; the bound itself is not below it."""
    prob = torch.tensor([0.0019, 0.002, 0.0021, 0.0019, 0.0019])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0])
    found = SpuriousTokens().candidates(prob, advantage, torch.ones(5, dtype=torch.bool))
    assert found.tolist() == [True, False, False, False, False]


def test_a_method_needs_nothing_that_it_does_not_say() -> None:
    class Bare(Method):
        def advantages(self, rewards: Tensor, groups: Tensor, counted: Tensor) -> Tensor:
            return rewards

        def coefficients(self, batch: TokenBatch, statistics: Statistics) -> Tensor:
            return torch.ones_like(batch.log_prob)

        def token_loss(self, batch: TokenBatch, statistics: Statistics, state: State) -> TokenTerms:
            return TokenTerms(-batch.log_prob, {})

    assert not Bare().needs_reference and not Bare().needs_entropy_gradient


def test_the_gate_closes_above_the_target_and_keeps_its_state_without_a_number() -> None:
    method = build_method({"name": "stare", "entropy_target": 0.3})
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in method.initial_state().items()
    }
    closed = method.control(state, {"entropy": torch.tensor(0.4, dtype=torch.float64)})
    assert float(closed["gate"]) == 0
    kept = method.control(closed, {"entropy": torch.tensor(float("nan"), dtype=torch.float64)})
    assert float(kept["gate"]) == 0
    at_target = method.control(state, {"entropy": torch.tensor(0.3, dtype=torch.float64)})
    assert float(at_target["gate"]) == 0  # strictly below opens
    assert float(method.control(kept, {"entropy": torch.tensor(0.29)})["gate"]) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "stair"}, "did you mean 'stare'"),
        ({"name": "stare", "amplfy": 2}, "did you mean 'amplify'"),
        ({"name": "stare", "amplify": 0.5}, "amplify must be at least 1"),
        ({"name": "stare", "variant": "O9"}, "'O1', 'O2', 'O3', 'O4', 'C1', 'C2', 'C3' or 'C4'"),
        ({"name": "stare", "share": "many"}, "must be a number"),
        ({"name": "grpo", "clip_low": 0}, "clip_low"),
        ({}, "name is missing"),
        ({"name": "no.such.Method"}, "cannot import"),
    ],
)
def test_bad_settings_are_one_clear_error(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_method(settings)
