"""verl's losses beside ours, from its installed package: what docs/from_verl.md says is equal, and
what differs.

pip install --no-deps verl==0.9.1        and what its import asks for, in an environment of its own:
its dependencies change others of this project's
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.peer_batches import (
    GROUPS,
    Padded,
    advantages,
    assert_equal,
    our_loss,
    padded,
    rollout_batch,
    row_of,
)

from megatron_stare.algorithms.kl import kl_estimate
from megatron_stare.rewards.dapo_verifier import verify

pytestmark = pytest.mark.slow
core = pytest.importorskip("verl.trainer.ppo.core_algos")
workers = pytest.importorskip("verl.workers.config")
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
math_dapo = pytest.importorskip("verl.utils.reward_score.math_dapo")

LENGTH_NORM = 11
MODES = dict(
    pair.strip().split(": ") for pair in row_of("from_verl.md", "actor.loss_agg_mode")[2].split(";")
)


def actor(**settings: Any) -> Any:
    fixed = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = workers.ActorConfig(**fixed, **settings)
    if settings.get("loss_agg_mode") == "seq-mean-token-sum-norm":
        config.global_batch_info["loss_scale_factor"] = LENGTH_NORM
    return config


def their_loss(
    name: str,
    batch: Padded,
    advantage: torch.Tensor,
    weights: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's policy loss and its leaf."""
    now = batch.now.clone().requires_grad_()
    config = actor(**settings)
    loss, _ = core.get_policy_loss_fn(name)(
        old_log_prob=batch.old,
        log_prob=now,
        advantages=advantage[:, None].expand_as(now).clone(),
        response_mask=batch.mask,
        loss_agg_mode=settings.get("loss_agg_mode", "token-mean"),
        config=config,
        rollout_is_weights=weights,
    )
    return loss, now


def aggregation(mode: str) -> dict[str, Any]:
    """Our settings of a `loss_agg_mode`, as the page has them."""
    ours = MODES[mode]
    return {"aggregation": ours} | (
        {"length_norm": LENGTH_NORM} if ours.startswith("dr_grpo") else {}
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [0.8, 6.0])
def test_ppo_loss_in_every_aggregation_that_the_page_names(mode: str, width: float) -> None:
    batch = padded(width)
    settings = {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0} | aggregation(
        mode
    )
    loss, now = their_loss(
        "vanilla",
        batch,
        advantages(settings, batch),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        loss_agg_mode=mode,
    )
    assert_equal(our_loss(settings, batch), loss, now)


def test_the_page_names_all_aggregations_but_one() -> None:
    known = {"token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"}
    assert MODES.keys() == known  # token-sum, which divides by nothing, is not there


def test_to_release_0_7_the_norm_forgot_the_number_of_responses() -> None:
    batch = padded()
    now = our_loss({"name": "grpo", "aggregation": "dr_grpo", "length_norm": LENGTH_NORM}, batch)
    then = our_loss(
        {"name": "grpo", "aggregation": "dr_grpo_verl", "length_norm": LENGTH_NORM}, batch
    )
    torch.testing.assert_close(then[1], len(GROUPS) * now[1])


@pytest.mark.parametrize("spread", [True, False])
def test_advantages(spread: bool) -> None:
    batch = padded()
    key, value = row_of("from_verl.md", "algorithm.norm_adv_by_std_in_grpo")[1:3]
    named = dict(pair.strip().split(": ") for pair in value.split(";"))
    settings = {"name": "grpo", key.strip("` ").partition(".")[2]: named[str(spread).lower()]}
    rewards = torch.zeros_like(batch.mask)
    rewards[:, 0] = rollout_batch(batch).rewards.double()
    theirs, _ = core.compute_grpo_outcome_advantage(
        rewards, batch.mask, np.array(GROUPS), norm_adv_by_std_in_grpo=spread
    )
    torch.testing.assert_close(
        advantages(settings, batch).double(), theirs[:, 0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("form", ["token", "sequence"])
def test_gspo(form: str) -> None:
    batch = padded(0.05)
    settings = {"name": "gspo", "form": form, "clip_low": 3e-3, "clip_high": 4e-3}
    loss, now = their_loss(
        "gspo",
        batch,
        advantages(settings, batch),
        clip_ratio_low=3e-3,
        clip_ratio_high=4e-3,
        loss_agg_mode="seq-mean-token-mean",
    )
    assert_equal(our_loss(settings, batch), loss, now)


@pytest.mark.parametrize(("form", "limit"), [("token", 10.0), ("sequence", 20.0)])
def test_gspo_of_far_policies_is_cut_where_the_page_says(form: str, limit: float) -> None:
    batch = padded(0.05)
    batch = Padded(**{**vars(batch), "now": batch.old + 12.0})
    settings = {"name": "gspo", "form": form}
    advantage = advantages(settings, batch)
    loss, _ = their_loss(
        "gspo",
        batch,
        advantage,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        loss_agg_mode="seq-mean-token-mean",
    )
    bounded = torch.where(advantage > 0, 1 + 4e-4, torch.tensor(min(12.0, limit)).exp())
    wanted = -(bounded * advantage).mean()
    ours, *_ = our_loss(settings, batch)
    torch.testing.assert_close(ours, wanted.double(), rtol=1e-4, atol=0)
    assert torch.allclose(ours, loss, rtol=1e-4) == (form == "token")


def test_cispo() -> None:
    batch = padded(1.5)
    settings = {"name": "cispo", "clip_low": 0.2, "clip_high": 0.3}
    loss, now = their_loss(
        "cispo", batch, advantages(settings, batch), clip_ratio_low=0.2, clip_ratio_high=0.3
    )
    assert_equal(our_loss(settings, batch), loss, now)


@pytest.mark.parametrize("moved", [False, True])
def test_kl_cov_of_a_first_and_a_later_update_and_its_unbounded_ratio(moved: bool) -> None:
    batch = padded(1.5, moved=moved)
    policy = workers.PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=0.5)
    settings = {"name": "kl_cov", "share": 0.1, "coef": 0.5}
    loss, now = their_loss("kl_cov", batch, advantages(settings, batch), policy_loss=policy)
    # |x| has no slope at 0 on either side: a first update moves the policy by next to nothing
    assert_equal(our_loss(settings, batch, "current"), loss, now)
    if moved:  # which the covariances of the log-prob pass do not give
        assert not torch.allclose(
            our_loss(settings, batch)[1], our_loss(settings, batch, "current")[1]
        )
    far = Padded(**{**vars(batch), "old": batch.old - 22.0})
    loss, _ = their_loss("kl_cov", far, advantages(settings, far), policy_loss=policy)
    ours, *_ = our_loss(settings, far)
    assert abs(loss.item()) > 5 * abs(ours.item())


@pytest.mark.parametrize("moved", [False, True])
def test_clip_cov_that_draws_all_candidates(moved: bool) -> None:
    """The draw itself is another one: seeded here, and of the batch."""
    batch = padded(3.0, moved=moved)
    policy = workers.PolicyLossConfig(
        loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=3.0
    )
    settings = {"name": "clip_cov", "share": 1.0, "cov_low": 0.2, "cov_high": 3.0}
    bounds = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3}
    settings |= {"clip_low": 0.3, "clip_high": 0.3}
    loss, now = their_loss(
        "clip_cov", batch, advantages(settings, batch), policy_loss=policy, **bounds
    )
    ours = our_loss(settings, batch, "current")
    assert (ours[1] == 0).sum() > (batch.mask == 0).sum()
    assert_equal(ours, loss, now)


@pytest.mark.parametrize(
    ("theirs", "estimator"), [("kl", "k1"), ("k2", "k2"), ("low_var_kl", "k3")]
)
def test_kl_to_a_reference(theirs: str, estimator: str) -> None:
    batch = padded()
    settings = {"name": "grpo", "aggregation": "token_mean"}
    with_kl = settings | {"reference_kl": {"coef": 0.3, "estimator": estimator}}
    loss, now = their_loss("vanilla", batch, advantages(settings, batch), clip_ratio_c=1e6)
    kl = core.agg_loss(core.kl_penalty(now, batch.reference, theirs), batch.mask, "token-mean")
    assert_equal(our_loss(with_kl, batch), loss + 0.3 * kl, now)


def test_kl_far_from_the_reference_is_bounded_as_the_page_says() -> None:
    d = torch.tensor([4.0, 15.0, 25.0, -25.0], dtype=torch.float64)
    zero = torch.zeros_like(d)
    for theirs, estimator, want_theirs, want_ours in (
        ("kl", "k1", -d, -d.clamp(-20, 20)),
        ("k2", "k2", d**2 / 2, d.clamp(-20, 20) ** 2 / 2),
        (
            "low_var_kl",
            "k3",
            (d.clamp(-20, 20).exp() - d.clamp(-20, 20) - 1).clamp_max(10),
            d.clamp(-20, 20).exp() - d.clamp(-20, 20) - 1,
        ),
    ):
        torch.testing.assert_close(core.kl_penalty(zero, d, theirs), want_theirs)
        torch.testing.assert_close(kl_estimate(zero, d, estimator), want_ours)  # type: ignore[arg-type]


def test_entropy_bonus() -> None:
    batch = padded()
    settings = {"name": "grpo", "aggregation": "sequence_mean"}
    loss, now = their_loss(
        "vanilla",
        batch,
        advantages(settings, batch),
        clip_ratio_c=1e6,
        loss_agg_mode="seq-mean-token-mean",
    )
    entropy = batch.entropy.clone().requires_grad_()
    bonus = core.agg_loss(entropy, batch.mask, "seq-mean-token-mean")
    ours = our_loss(settings | {"entropy_bonus": {"coef": 0.07}}, batch)
    assert_equal(ours, loss - 0.07 * bonus, now, entropy)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("threshold", "ours"),
    [
        ("1.2", {"mode": "truncate", "high": 1.2}),
        ("0.8_1.25", {"mode": "icepop", "low": 0.8, "high": 1.25}),
    ],
)
@pytest.mark.parametrize("normalise", [False, True])
def test_correction(level: str, threshold: str, ours: dict[str, Any], normalise: bool) -> None:
    batch = padded()
    weights, _ = corrections.compute_rollout_correction_weights(
        batch.old - batch.rollout,
        batch.mask,
        level,
        threshold,
        rollout_is_batch_normalize=normalise,
    )
    if level == "sequence" and normalise:  # the mean over responses, ours over tokens
        one_each = weights.max(1).values
        weights = (
            weights * one_each.mean() / ((one_each * batch.lengths).sum() / batch.lengths.sum())
        )
    settings = {
        "name": "grpo",
        "aggregation": "token_mean",
        "correction": ours | {"level": level, "normalise": normalise},
    }
    loss, now = their_loss("vanilla", batch, advantages(settings, batch), weights, clip_ratio_c=1e6)
    assert_equal(our_loss(settings, batch), loss, now)


def test_rejection_by_token_has_mirrored_bounds() -> None:
    batch = padded()
    mask, _ = corrections.compute_rollout_rejection_mask(
        batch.old - batch.rollout, batch.mask, "token_k1", "0.8_1.1"
    )
    kept = Padded(**{**vars(batch), "mask": batch.mask * mask})
    assert 0 < kept.mask.sum() < batch.mask.sum()
    settings = {"name": "grpo", "aggregation": "token_mean"}
    ours = our_loss(
        settings | {"correction": {"mode": "truncate", "high": 1e6, "reject": [1 / 1.1, 1 / 0.8]}},
        batch,
    )
    weights = (batch.old - batch.rollout).exp()
    loss, now = their_loss("vanilla", kept, advantages(settings, batch), weights, clip_ratio_c=1e6)
    assert_equal(ours, loss, now)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Answer: 34", "34"),
        ("Answer: $34$", "34"),
        (r"Answer: \frac12", r"\frac{1}{2}"),
        ("Answer: 33\nAnswer: 34", "34"),
        ("Answer: 34\nAnswer: 33", "34"),
        ("The answer is 34", "34"),
        ("Answer: 1,234 dollars", "1234"),
        ("Answer: 34" + "\nand so on" * 40, "34"),
        (r"Answer: \boxed{34}", "34"),
        ("answer :  $x = \\text{5}$", "5"),
    ],
)
def test_dapos_answers(response: str, answer: str) -> None:
    assert math_dapo.compute_score(response, answer)["acc"] == bool(verify(response, answer))


def test_a_box_without_answer_counts_in_verl_alone() -> None:
    assert math_dapo.compute_score(r"so \boxed{34}", "34")["acc"]
    assert verify(r"so \boxed{34}", "34") == 0
