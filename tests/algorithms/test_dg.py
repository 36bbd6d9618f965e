"""DG against worked numbers, its gate, and where it differs from every other method."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.token_batches import ask, loss_and_gradient, state_of, token_batch

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.dg import Dg
from megatron_stare.algorithms.entropy_bonus import EntropyBonus
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.config.load import build_method

MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


def one_step(**settings: Any) -> tuple[Any, torch.Tensor]:
    """A batch in float64 whose policy is the one that sampled, and DG's gradient in log-probs."""
    method = Dg(**settings)
    batch = token_batch(MIXED, method=method, off_policy=0.0)
    batch.old_log_prob = batch.old_log_prob.double()
    batch.log_prob = batch.old_log_prob.clone().requires_grad_()
    batch.advantage = batch.advantage.double()
    return batch, loss_and_gradient(method, batch)[1]


@pytest.mark.parametrize("eta", [1.0, 0.3, 4.0])
def test_the_weight_is_the_sigmoid_of_advantage_times_surprisal(eta: float) -> None:
    """By plain arithmetic: dJ / d ln p = w A / N where the ratio is 1."""
    batch, gradient = one_step(eta=eta)
    number = len(batch.advantage)
    for row in range(number):
        advantage, surprisal = float(batch.advantage[row]), -float(batch.old_log_prob[row])
        weight = 1 / (1 + math.exp(-advantage * surprisal / eta))
        assert float(-gradient[row]) == pytest.approx(weight * advantage / number, abs=1e-12)


def test_worked_numbers() -> None:
    """A rare token (p = e^-2) and a common one (p near 1), right and wrong, with advantage 1.5."""
    method = Dg()
    batch = token_batch([1.0, 0.0], method=method, group_size=2, lengths=[2, 2], off_policy=0.0)
    batch.old_log_prob = torch.tensor([-2.0, 0.0, -2.0, 0.0], dtype=torch.float64)
    batch.advantage = torch.tensor([1.5, 1.5, -1.5, -1.5], dtype=torch.float64)
    found = method.weights(batch, {}, state_of(method))
    assert found.tolist() == pytest.approx([0.9525741268, 0.5, 0.0474258732, 0.5], abs=1e-9)


@pytest.mark.parametrize(("target", "opens"), [(0.01, False), (100.0, True)])
def test_behind_the_gate_a_token_has_one_half(target: float, opens: bool) -> None:
    batch, gated = one_step(entropy_target=target)
    _, free = one_step()
    plain = loss_and_gradient(Grpo(aggregation="token_mean"), batch)[1]
    torch.testing.assert_close(gated, free if opens else plain / 2)
    method = Dg(entropy_target=target)
    statistics = ask(method, batch)
    state = state_of(method, statistics)
    assert (
        float(state["gate"]) == float(opens) == float(method.metrics(statistics, state)["dg/gate"])
    )


def test_without_a_finite_entropy_the_gate_stays() -> None:
    method = Dg(entropy_target=1.0)
    for before in (0.0, 1.0):
        state = {"gate": torch.tensor(before, dtype=torch.float64)}
        after = method.control(state, {"entropy": torch.tensor(math.nan)})
        assert float(after["gate"]) == before


def test_a_right_answer_is_pushed_in_no_other_way_by_any_other_method() -> None:
    """The gradient on one batch differs from every other method's, whatever its scale."""
    method = Dg()
    batch = token_batch(MIXED, method=method)
    own = loss_and_gradient(method, batch)[1]
    for name in METHODS.keys() - {"dg"}:
        settings = {"entropy_target": None} if name in ("stare", "stapo_stare") else {}
        length = {"length_norm": 12} if name == "dr_grpo" else {}
        other = loss_and_gradient(build_method({"name": name, **settings, **length}), batch)[1]
        cosine = torch.nn.functional.cosine_similarity(own, other, dim=0)
        assert float(cosine) < 0.999, name


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="eta must be above 0"):
        Dg(eta=0.0)
    with pytest.raises(ValueError, match="entropy_target must be above 0 nats"):
        Dg(entropy_target=0.0)
    with pytest.raises(ValueError, match="steer the same entropy"):
        Dg(entropy_target=0.3, entropy_bonus=EntropyBonus(target=0.3))
