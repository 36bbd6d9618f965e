"""Every method is exact over micro-batches, detached where it must be, and well-behaved at the
edges."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from support.token_batches import ask, by_sequence, loss_and_gradient, state_of, token_batch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_stare.algorithms import METHODS
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.entropy_bonus import EntropyBonus
from megatron_stare.algorithms.kl import ReferenceKl
from megatron_stare.algorithms.policy import PolicyGradient
from megatron_stare.config.load import build_method

MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
# settings that make a rare selection happen in a batch of a few dozen tokens
EAGER: dict[str, dict[str, Any]] = {
    "clip_b": {"mu": 0.5},
    "clip_cov": {"share": 0.1, "cov_low": 0.0},
    "clip_v": {"mu": 0.3, "max_share": 0.1},
    "entropic": {"probable_above": 0.5},
    "kl_cov": {"share": 0.1},
    "stapo": {"tau_p": 0.1},
    "stapo_stare": {"variant": "C2", "spurious": {"tau_p": 0.1}, "entropy_target": None},
    "stare": {"variant": "C2", "entropy_target": None},
}


def built(name: str, **more: Any) -> PolicyGradient:
    method = build_method({"name": name, **EAGER.get(name, {}), **more})
    assert isinstance(method, PolicyGradient)
    return method


def with_everything(name: str, **more: Any) -> PolicyGradient:
    return replace(
        built(name, **more),
        correction=Correction(
            level="sequence", mode="mask", low=0.2, high=5.0, veto=0.5, normalise=True
        )
        if name != "dr_grpo"
        else Correction(mode="icepop"),
        reference_kl=ReferenceKl(coef=0.1),
        entropy_bonus=EntropyBonus(coef=0.01),
    )


@pytest.mark.parametrize("make", [built, with_everything])
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_does_not_depend_on_micro_batches(name: str, make: Any) -> None:
    method = make(name)
    batch = token_batch(MIXED, method=method)
    whole, gradient = loss_and_gradient(method, batch)
    parts, gradient_of_parts = loss_and_gradient(method, batch, by_sequence(batch))
    assert whole.isfinite() and gradient.abs().max() > 0
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(gradient_of_parts, gradient)


@pytest.mark.parametrize("make", [built, with_everything])
@pytest.mark.parametrize("name", METHODS)
def test_the_host_never_waits_for_a_value(name: str, make: Any) -> None:
    # fake tensors have no values: .item(), `if` on a tensor, or a shape that depends on values
    # raises
    method = make(name)
    batch = token_batch(MIXED, method=method)
    with FakeTensorMode() as mode:
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, torch.Tensor):
                setattr(batch, field.name, mode.from_tensor(value))
        statistics = ask(method, batch)
        state = state_of(method, statistics)
        loss = method.token_loss(batch, statistics, state).loss
        assert (method.coefficients(batch, statistics) * loss).sum().dim() == 0
        method.metrics(statistics, state)


@pytest.mark.parametrize("name", METHODS)
def test_only_the_log_prob_carries_gradient(name: str) -> None:
    method = built(name)
    batch = token_batch(MIXED, method=method)
    for field in ("old_log_prob", "rollout_log_prob", "entropy", "advantage"):
        setattr(batch, field, getattr(batch, field).clone().requires_grad_())
    statistics = ask(method, batch)
    assert not any(x.requires_grad for x in statistics.values() if isinstance(x, torch.Tensor))
    loss = method.token_loss(batch, statistics, state_of(method, statistics)).loss
    assert not method.coefficients(batch, statistics).requires_grad
    loss.sum().backward()
    assert batch.log_prob.grad is not None
    for field in ("rollout_log_prob", "entropy", "advantage"):
        gradient = getattr(batch, field).grad
        assert gradient is None or gradient.abs().max() == 0, field


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 1 / 3])
def test_equal_rewards_teach_nothing(name: str, reward: float) -> None:
    method = built(name)
    loss, gradient = loss_and_gradient(
        method, token_batch([reward] * 8, method=method, off_policy=0.0)
    )
    assert loss == 0
    assert gradient.abs().max() == 0


@pytest.mark.parametrize("name", METHODS)
def test_one_token_a_response(name: str) -> None:
    method = built(name)
    loss, gradient = loss_and_gradient(
        method, token_batch([1.0, 0.0], method=method, group_size=2, lengths=[1, 1])
    )
    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_nothing_carries_loss(name: str) -> None:
    method = built(name)
    batch = token_batch(MIXED, method=method)
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    batch.sequence_lengths, batch.num_sequences = torch.zeros(8, dtype=torch.int64), 0
    loss, gradient = loss_and_gradient(method, batch)
    assert loss == 0 and gradient.abs().max() == 0


@pytest.mark.parametrize("name", METHODS)
def test_positions_outside_the_mask_do_not_count(name: str) -> None:
    method = with_everything(name)
    batch = token_batch(MIXED, method=method)
    rows = torch.arange(len(batch.loss_mask))
    kept = rows[batch.sequence < 7]
    shorter = batch.select(kept)
    batch.loss_mask = batch.sequence < 7
    lengths = batch.sequence_lengths.clone()
    lengths[7] = 0
    batch.sequence_lengths, batch.num_sequences = lengths, 7
    shorter.sequence_lengths, shorter.num_sequences = lengths, 7
    want, gradient = loss_and_gradient(method, shorter)
    got, gradient_of_all = loss_and_gradient(method, batch)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient_of_all[kept], gradient)
    assert (gradient_of_all[batch.sequence == 7] == 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_equal_surprisals_and_minus_zero(name: str) -> None:
    method = built(name)
    batch = token_batch(MIXED, method=method, off_policy=0.0)
    batch.old_log_prob = torch.full_like(batch.old_log_prob, -0.0)
    batch.log_prob = batch.old_log_prob.clone()
    loss, gradient = loss_and_gradient(method, batch)
    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "dr_grpo", "length_norm": None}, "needs length_norm"),
        ({"name": "grpo", "length_norm": 10}, "does not use length_norm"),
        ({"name": "dr_grpo", "correction": {"mode": "mask"}}, "denominator"),
        ({"name": "stapo", "aggregation": "dr_grpo", "length_norm": 9}, "denominator"),
        ({"name": "gspo", "aggregation": "token_mean"}, "sequence_mean"),
        ({"name": "gspo", "correction": {"level": "token"}}, "sequence or geometric"),
        (
            {"name": "grpo_s", "correction": {"level": "sequence", "reject": [0.5, 2]}},
            "reject null",
        ),
        ({"name": "cispo", "dual_clip": 10}, "unknown name 'dual_clip'"),
        ({"name": "kl_cov", "clip_low": 0.2}, "unknown name 'clip_low'"),
        ({"name": "dapo", "length_penalty": {}}, "both punish length"),
        ({"name": "dapo", "overlong": {"max_lenth": 9}}, "unknown name 'max_lenth'"),
        ({"name": "stare", "entropy_bonus": {"target": 0.2}}, "steer the same entropy"),
        ({"name": "grpo", "entropy_bonus": {}}, "coef above 0, or a target"),
        ({"name": "grpo", "correction": {"level": "geometric", "normalise": True}}, "normalise"),
        ({"name": "grpo", "reference_kl": {"coef": -1}}, "at least 0"),
        ({"name": "gtpo", "entropy_clamp": [0.3, 0.2]}, "entropy_clamp"),
        ({"name": "stare", "rare_below": 1.0}, "rare_below must lie in"),
        ({"name": "stare", "rare_below": 0.1, "common": "bottom"}, "common must be complement"),
        (
            {"name": "stare", "gate": "token", "entropy_target": None},
            "gate token needs an entropy_target",
        ),
        ({"name": "twenty_entropy", "share": 0}, "share"),
        ({"name": "clip_cov", "cov_low": 5}, "cov_low"),
        ({"name": "clip_b", "mu": 0}, "mu must be above 0"),
        ({"name": "clip_b", "aggregation": "dr_grpo", "length_norm": 9}, "denominator"),
        ({"name": "clip_v", "max_share": 0}, "max_share in"),
        ({"name": "entropic", "entropy_target": 0}, "entropy_target must be above 0 nats"),
        ({"name": "entropic", "entropy_target": None}, "entropy_target"),
        ({"name": "dg", "entropy_target": 0.0}, "entropy_target must be above 0 nats"),
        ({"name": "entropic", "probable_above": 1}, "probable_above"),
        ({"name": "entropic", "integral": -1}, "proportional and integral"),
        ({"name": "entropic", "entropy_bonus": {"target": 0.2}}, "steer the same entropy"),
        ({"name": "gepo", "weight_high": 0.5}, "below weight_low"),
        ({"name": "gepo", "rate": 0}, "rate must lie in"),
        ({"name": "repo_r", "zeta_min": 0.1}, "at most zeta_max"),
        ({"name": "repo_r", "zeta": -0.2, "entropy_target": 0.3}, "zeta must lie within zeta_max"),
        ({"name": "repo_r", "entropy_target": -1}, "entropy_target must be above 0 nats"),
        (
            {"name": "repo_r", "entropy_target": 0.2, "entropy_bonus": {"target": 0.2}},
            "steer the same entropy",
        ),
        ({"name": "steer", "weight_min": 0}, "weight_min must lie in"),
        ({"name": "steer", "floor": 0}, "floor must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):
        build_method(settings)
