"""Advantages by entropy, ratios by response, importance correction, KL, entropy bonus, and what
truncation means."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from support.token_batches import ask, loss_and_gradient, state_of, token_batch
from torch import Tensor

from megatron_stare.algorithms.cispo import Cispo
from megatron_stare.algorithms.correction import Correction
from megatron_stare.algorithms.dapo import Dapo
from megatron_stare.algorithms.entropy_bonus import EntropyBonus
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.grpo_s import GrpoS
from megatron_stare.algorithms.gspo import Gspo
from megatron_stare.algorithms.gtpo import Gtpo
from megatron_stare.algorithms.kl import ReferenceKl, kl_estimate
from megatron_stare.algorithms.shaping import LengthPenalty, Overlong
from megatron_stare.algorithms.twenty_entropy import TwentyEntropy
from megatron_stare.records.batch import Prompt
from megatron_stare.records.batch_statistics import Count, scalar
from megatron_stare.records.rollout_batch import RolloutBatch
from megatron_stare.records.trajectory import sampled_trajectory

MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]
PLAIN = Grpo(aggregation="token_mean")


def test_joint_gtpo_keeps_the_outcome_in_the_mean_and_separate_loses_it() -> None:
    batch = token_batch(MIXED)
    correct = torch.tensor(MIXED)[batch.sequence] > 0
    joint, separate = Gtpo(), Gtpo(normalise="separate")
    advantage = joint.token_advantages(batch, ask(joint, batch))
    assert (advantage[correct] > 0).all()
    assert (advantage[~correct] < 0).all()
    advantage = separate.token_advantages(batch, ask(separate, batch))
    for group in (0, 1):
        for side in (correct, ~correct):
            here = side & (batch.sequence // 4 == group)
            assert float(advantage[here].mean()) == pytest.approx(0, abs=1e-5)


def exact_spread(entropies: list[list[Fraction]], alpha2: Fraction) -> Fraction:
    """Variance of a correct side's rewards, eq. 3 of 2508.04349 without eps, in exact arithmetic.

    Args:
        entropies: of every correct response, by position.
    """
    rewards = []
    for response in entropies:
        for t, entropy in enumerate(response):
            here = [other[t] for other in entropies if t < len(other)]
            rewards.append(1 + alpha2 * len(here) * entropy / sum(here))
    mean = sum(rewards) / len(rewards)
    return sum((r - mean) ** 2 for r in rewards) / len(rewards)


@pytest.mark.parametrize("noise", [0.0, 1e-7], ids=["one", "two, alike but for float32"])
@pytest.mark.parametrize("seed", range(20))
def test_separate_gtpo_does_not_divide_by_rounding(seed: int, noise: float) -> None:
    rewards = [1.0, 0.0, 0.0, 1.0] if noise else [1.0, 0.0, 0.0, 0.0]
    batch = token_batch(rewards, seed=seed, lengths=[7, 5, 8, 7])
    batch.entropy = batch.entropy**8  # from 256 nats to what a sure token has
    if noise:  # two correct responses whose entropies differ in the last bits
        batch.entropy[batch.sequence == 3] = batch.entropy[batch.sequence == 0] * (1 + noise)
    method = Gtpo(normalise="separate")
    advantage = method.token_advantages(batch, ask(method, batch))
    correct = torch.tensor(rewards)[batch.sequence] > 0
    entropies = [
        [Fraction(float(x)) for x in batch.entropy[batch.sequence == i]]
        for i in (0, 3)
        if rewards[i]
    ]
    # of a standard deviation of 1e-8
    assert float(exact_spread(entropies, Fraction(1, 10))) < 1e-16
    assert advantage[correct].tolist() == [0.0] * int(correct.sum())
    assert (advantage[~correct] != 0).any()  # the other side has a spread, and keeps it


def test_separate_gtpo_keeps_a_spread_that_is_small_but_real() -> None:
    batch = token_batch([1.0, 0.0, 0.0, 1.0], lengths=[4, 4, 4, 4])
    batch.entropy = torch.ones_like(batch.entropy)
    batch.entropy[batch.sequence == 3] = 1.001
    method = Gtpo(normalise="separate")
    advantage = method.token_advantages(batch, ask(method, batch))
    assert advantage[batch.sequence == 3].tolist() == pytest.approx([1.0] * 4, rel=1e-3)
    assert advantage[batch.sequence == 0].tolist() == pytest.approx([-1.0] * 4, rel=1e-3)


def test_joint_gtpo_turns_tokens_round_where_the_other_side_is_small() -> None:
    """Seven right answers of eight tokens and a wrong one of one: the mean is nearly that of the
    right tokens."""
    batch = token_batch([1.0] * 7 + [0.0], group_size=8, lengths=[8] * 7 + [1])
    advantage, correct = Gtpo().token_advantages(batch, ask(Gtpo(), batch)), batch.sequence < 7
    assert (advantage[correct] < 0).any() and (advantage[correct] > 0).any()
    assert float(advantage[correct].mean()) > 0 > float(advantage[~correct].mean())


def test_gtpo_compares_within_the_prompt_or_over_the_batch() -> None:
    batch = token_batch(MIXED)
    group, whole = Gtpo(), Gtpo(scope="batch")
    first = batch.sequence < 4
    alone = batch.select(first.nonzero().squeeze(1))
    got = group.token_advantages(batch, ask(group, batch))[first]
    torch.testing.assert_close(got, group.token_advantages(alone, ask(group, alone)))
    assert not torch.allclose(got, whole.token_advantages(batch, ask(whole, batch))[first])


@pytest.mark.parametrize("method", [Gtpo(), GrpoS()])
def test_a_penalty_for_length_reaches_the_shaped_reward(method: Gtpo | GrpoS) -> None:
    batch = token_batch(MIXED)
    plain = method.token_advantages(batch, ask(method, batch))
    batch.penalties = torch.tensor([-0.5, 0, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    less = method.token_advantages(batch, ask(method, batch))
    assert (less[batch.sequence == 0] < plain[batch.sequence == 0]).all()
    torch.testing.assert_close(less[batch.sequence >= 4], plain[batch.sequence >= 4])


def test_gtpo_survives_an_entropy_of_zero() -> None:
    batch = token_batch(MIXED)
    batch.entropy = torch.zeros_like(batch.entropy)
    for method in (Gtpo(), GrpoS()):
        assert method.token_advantages(batch, ask(method, batch)).isfinite().all()


def test_the_token_form_of_gspo_is_bounded_by_ten_nats() -> None:
    batch = token_batch(MIXED, lengths=[1] * 8)
    apart = torch.tensor([9.0, 10.0, 11.0, 15.0, 30.0, -15.0, 0.0, 1.0])
    batch.log_prob = (batch.old_log_prob + apart).detach().requires_grad_()
    want = apart.double().clamp_max(10.0).exp().float()
    torch.testing.assert_close(Gspo(form="token").ratio(batch).detach(), want, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "correction",
    [Correction(mode="truncate", reject=(1.0, 2.0)), Correction(mode="mask", low=1.0, high=2.0)],
)
def test_tokens_at_the_bounds_are_kept(correction: Correction) -> None:
    method = Grpo(aggregation="token_mean", correction=correction)
    batch = token_batch([1.0, 0.0], group_size=2, lengths=[2, 2], method=method)
    two = torch.tensor(2.0).log()
    batch.old_log_prob = batch.rollout_log_prob + torch.stack(
        [torch.zeros(()), two, -0.01 * two, 1.01 * two]
    )
    assert method.narrowed(batch, ask(method, batch)).kept.loss_mask.tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_both_forms_of_gspo_have_one_gradient() -> None:
    batch = token_batch(MIXED, method=Gspo(), off_policy=1e-4)
    torch.testing.assert_close(
        loss_and_gradient(Gspo(), batch), loss_and_gradient(Gspo(form="token"), batch)
    )


def test_cispo_keeps_the_gradient_that_the_clip_would_take() -> None:
    batch = token_batch(MIXED, method=Cispo(), off_policy=4.0)
    _, clipped = loss_and_gradient(Grpo(aggregation="token_mean", clip_high=0.28), batch)
    _, gradient = loss_and_gradient(Cispo(clip_high=0.28), batch)
    assert (clipped == 0).any()
    assert (gradient != 0).all()
    weight = (batch.log_prob - batch.old_log_prob).detach().exp().clamp_max(1.28)
    torch.testing.assert_close(gradient, -weight * batch.advantage / len(weight))


def corrected(**settings: Any) -> Grpo:
    return Grpo(aggregation="token_mean", correction=Correction(**settings))


def test_a_correction_multiplies_the_gradient_by_the_weight() -> None:
    batch = token_batch(MIXED, method=PLAIN, off_policy=0.0)
    _, plain = loss_and_gradient(PLAIN, batch)
    own = (batch.old_log_prob - batch.rollout_log_prob).exp()
    _, gradient = loss_and_gradient(corrected(high=1.1), batch)
    torch.testing.assert_close(gradient, plain * own.clamp_max(1.1))


@pytest.mark.parametrize("mode", ["mask", "icepop"])
def test_mask_leaves_the_denominator_and_icepop_does_not(mode: str) -> None:
    batch = token_batch(MIXED, method=PLAIN, off_policy=0.0)
    own = (batch.old_log_prob - batch.rollout_log_prob).exp()
    inside = (own >= 0.9) & (own <= 1.1)
    assert 0 < int(inside.sum()) < len(inside)
    _, gradient = loss_and_gradient(corrected(mode=mode, low=0.9, high=1.1), batch)
    number = int(inside.sum()) if mode == "mask" else len(inside)
    torch.testing.assert_close(gradient, torch.where(inside, -own * batch.advantage / number, 0.0))


def test_a_veto_takes_the_whole_response_and_its_place_in_the_mean() -> None:
    method = replace(corrected(veto=0.7), aggregation="sequence_mean")
    batch = token_batch(MIXED, method=method, off_policy=0.0)
    ratio = torch.ones_like(batch.old_log_prob)
    ratio[(batch.sequence == 2).nonzero()[0]] = 0.5
    batch.rollout_log_prob = batch.old_log_prob - ratio.log()
    _, gradient = loss_and_gradient(method, batch)
    lengths = batch.sequence_lengths[batch.sequence]
    want = torch.where(batch.sequence == 2, 0.0, -batch.advantage / (7 * lengths))
    torch.testing.assert_close(gradient, want)


def test_normalised_weights_have_mean_1_over_the_kept() -> None:
    method = corrected(mode="mask", low=0.9, high=1.2, normalise=True)
    batch = token_batch(MIXED, method=method)
    statistics = ask(method, batch)
    kept = method.narrowed(batch, statistics).kept.loss_mask
    assert method.correction is not None
    assert float(method.correction.weights(batch, statistics)[kept].mean()) == pytest.approx(
        1, abs=1e-6
    )


NOWHERE = {"low": 1e3, "high": 1e4}  # bounds that no ratio of these batches meets


@pytest.mark.parametrize(
    "correction",
    [
        {"mode": "mask", **NOWHERE},
        {"mode": "icepop", **NOWHERE},
        {"mode": "icepop", "level": "sequence", **NOWHERE},
        {"reject": (1e3, 1e4)},
        {"mode": "clip", "veto": 0.999},
    ],
)
def test_normalised_weights_where_nothing_is_kept(correction: dict[str, Any]) -> None:
    method = corrected(**correction, normalise=True)
    batch = token_batch(MIXED, method=method)
    if "veto" in correction:
        batch.rollout_log_prob = batch.old_log_prob + 1
    statistics = ask(method, batch)
    assert bool(method.empty(statistics))
    loss, gradient = loss_and_gradient(method, batch)
    assert loss == 0 and (gradient == 0).all()  # a NaN is not 0
    shares = method.token_loss(batch, statistics, state_of(method, statistics)).shares
    assert (shares["correction/weight"] == 0).all()


def test_one_token_that_is_kept_makes_a_batch() -> None:
    for mode in ("mask", "icepop"):
        method = corrected(mode=mode, **NOWHERE, normalise=True)
        batch = token_batch(MIXED, method=method, off_policy=0.0)
        batch.rollout_log_prob[5] = batch.old_log_prob[5] - 8  # exp(8) lies between 1e3 and 1e4
        statistics = ask(method, batch)
        assert not method.empty(statistics)
        assert method.correction is not None
        # divided by the mean over the tokens in the denominator: itself, or under icepop all
        number = 1 if mode == "mask" else len(batch.loss_mask)
        assert float(method.correction.weights(batch, statistics)[5]) == pytest.approx(
            number, rel=1e-6
        )
        _, gradient = loss_and_gradient(method, batch)
        assert gradient.nonzero().tolist() == [[5]]


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_advantages_of_zero_leave_20_entropy_nothing(denominator: Any) -> None:
    method = TwentyEntropy(denominator=denominator, correction=Correction(normalise=True))
    batch = token_batch([1.0] * 8, method=method)
    assert bool(method.empty(ask(method, batch)))
    loss, gradient = loss_and_gradient(method, batch)
    assert loss == 0 and (gradient == 0).all()
    # tokens that stay in the denominator have a KL term, which is something to learn
    with_kl = replace(method, reference_kl=ReferenceKl(coef=0.1))
    assert bool(with_kl.empty(ask(with_kl, batch))) == (denominator == "kept")
    _, gradient = loss_and_gradient(with_kl, batch)
    assert bool((gradient != 0).any()) == (denominator == "all")


def test_plain_methods_are_empty_without_tokens_only() -> None:
    batch = token_batch([1.0] * 8, method=PLAIN)  # advantages of 0: kept, and a step like any other
    assert not PLAIN.empty(ask(PLAIN, batch))
    batch.loss_mask = torch.zeros_like(batch.loss_mask)
    assert bool(PLAIN.empty(ask(PLAIN, batch)))


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", lambda d: 1.0), ("k2", lambda d: -d), ("k3", lambda d: 1 - d.exp())],
)
def test_kl_estimators(estimator: Any, slope: Any) -> None:
    log_prob = torch.tensor([-1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -0.7], dtype=torch.float64)
    value = kl_estimate(log_prob, reference, estimator)
    value.sum().backward()
    d = (reference - log_prob).detach()
    torch.testing.assert_close(log_prob.grad, torch.zeros_like(d) + slope(d))
    assert value[0] == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_mean_they_estimate(estimator: Any) -> None:
    p, q = (
        torch.randn(6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) * 0.1
        for i in (0, 1)
    )
    p, q = p.log_softmax(0), q.log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    got = float((p.exp() * kl_estimate(p, q, estimator)).sum())
    assert got == pytest.approx(exact, rel=0.2 if estimator == "k2" else 1e-9)


def test_kl_joins_the_loss_and_asks_for_the_reference() -> None:
    method = replace(PLAIN, reference_kl=ReferenceKl(coef=0.5, estimator="k2"))
    assert method.needs_reference
    assert not replace(PLAIN, reference_kl=ReferenceKl(coef=0.0)).needs_reference
    batch = token_batch(MIXED, method=method)
    with_kl, without = loss_and_gradient(method, batch)[0], loss_and_gradient(PLAIN, batch)[0]
    assert batch.reference_log_prob is not None
    want = 0.25 * (batch.reference_log_prob - batch.log_prob).detach().square().mean()
    torch.testing.assert_close(with_kl - without, want)
    batch.reference_log_prob = None
    with pytest.raises(ValueError, match="log-prob of every token"):
        loss_and_gradient(method, batch)


def test_a_fixed_entropy_bonus() -> None:
    method = replace(PLAIN, entropy_bonus=EntropyBonus(coef=0.5))
    assert method.needs_entropy_gradient
    batch = token_batch(MIXED, method=method)
    entropy = torch.rand(len(batch.loss_mask)).requires_grad_()
    batch.current_entropy = entropy
    statistics = ask(method, batch)
    loss = method.token_loss(batch, statistics, state_of(method, statistics)).loss
    (method.coefficients(batch, statistics) * loss).sum().backward()
    torch.testing.assert_close(entropy.grad, torch.full_like(entropy, -0.5 / len(entropy)))


def test_a_steered_bonus_keeps_its_state_without_a_number() -> None:
    bonus = EntropyBonus(coef=0.001, target=0.2)
    state = {
        name: torch.tensor(x, dtype=torch.float64) for name, x in bonus.initial_state().items()
    }
    lost = bonus.control(
        state, {"entropy_bonus/measure": torch.tensor(float("nan"), dtype=torch.float64)}
    )
    assert lost == state


def rollout(lengths: list[int], rewards: list[float], truncated: list[bool]) -> RolloutBatch:
    prompt = Prompt(cursor=0, id="p", text="", answer="", token_ids=(1,))
    made = []
    for i, (n, reward, cut) in enumerate(zip(lengths, rewards, truncated, strict=True)):
        one = sampled_trajectory(
            prompt, i, [2] * n, [0.0] * n, finish_reason="length" if cut else "stop"
        )
        one.reward, one.reward_status = reward, "ok"
        made.append(one)
    return RolloutBatch.from_trajectories(made)


CUT = rollout([10, 20, 20, 5], [1.0, 0.0, 1.0, 0.0], [False, True, True, False])


@pytest.mark.parametrize(
    ("setting", "loss", "moments"),
    [
        ("keep", [True] * 4, [True] * 4),
        ("mask", [True, False, False, True], [True] * 4),
        ("drop", [True, False, False, True], [True, False, False, True]),
    ],
)
def test_what_a_truncated_response_counts_for(
    setting: Any, loss: list[bool], moments: list[bool]
) -> None:
    method = Grpo(truncated=setting)
    assert method.carries_loss(CUT).tolist() == loss
    assert method.baseline_mask(CUT).tolist() == moments
    want = method.advantages(CUT.rewards, CUT.groups, torch.tensor(moments))
    judged = method.judge(CUT)
    assert judged.advantages is not None and torch.equal(judged.advantages, want)
    assert judged.carries_loss is not None and judged.carries_loss.tolist() == loss


def test_overlong_punishment_comes_before_the_advantage() -> None:
    method = Dapo(overlong=Overlong(max_length=20, cache=10, factor=2.0))
    assert method.shaped_rewards(CUT).tolist() == [1.0, -2.0, -1.0, 0.0]
    judged = method.judge(CUT)
    assert judged.advantages is not None and judged.advantages[0] > 0 > judged.advantages[2]
    assert judged.penalties is not None and judged.penalties.tolist() == [0.0, -2.0, -2.0, 0.0]
    assert torch.equal(judged.rewards, CUT.rewards)


def test_grop_punishes_long_correct_answers_of_easy_prompts() -> None:
    batch = rollout([100, 200, 900, 400], [1.0, 1.0, 1.0, 0.0], [False] * 4)
    method = Grpo(length_penalty=LengthPenalty(easy_from=0.75))
    # L = max((100 + 900) / 2, 400) = 500
    assert method.shaped_rewards(batch).tolist() == pytest.approx(
        [1.0, 1.0, 1.0 - 0.5 * 400 / 500, 0.0]
    )


def test_grop_says_nothing_of_medium_prompts_with_as_many_wrong_answers() -> None:
    penalty = LengthPenalty(easy_from=0.75)
    correct, yes = torch.tensor([True, True, False, False]), torch.ones(4, dtype=torch.bool)
    groups = torch.zeros(4, dtype=torch.int64)
    assert penalty.penalty(torch.tensor([1, 9000, 2, 3]), correct, groups, yes).abs().max() == 0
    assert penalty.regimes(correct, groups, yes).tolist() == [1]


def test_responses_that_were_not_scored_leave_groups_unharmed() -> None:
    penalty = LengthPenalty(easy_from=0.75)
    groups, counted = torch.tensor([0, 0, 1, 1]), torch.tensor([True, True, False, False])
    got: Tensor = penalty.penalty(
        torch.tensor([1, 10, 5, 5]), torch.ones(4, dtype=torch.bool), groups, counted
    )
    assert got.isfinite().all()
    assert got[2:].abs().max() == 0


def test_the_denominator_is_asked_for_as_tokens() -> None:
    batch = token_batch(MIXED, method=PLAIN)
    asked = PLAIN.requests(batch, {})
    assert isinstance(asked["tokens"], Count)
    assert int(scalar(ask(PLAIN, batch), "tokens")) == len(batch.loss_mask)
