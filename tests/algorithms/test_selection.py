"""Which tokens the methods take: masks, selections, draws, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.token_batches import ask, loss_and_gradient, state_of, token_batch

from megatron_stare.algorithms.clip_cov import ClipCov
from megatron_stare.algorithms.draw import uniform
from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.algorithms.kl_cov import KlCov
from megatron_stare.algorithms.stapo import SpuriousTokens, Stapo
from megatron_stare.algorithms.stapo_stare import StapoStare
from megatron_stare.algorithms.stare import Stare
from megatron_stare.algorithms.twenty_entropy import TwentyEntropy
from megatron_stare.records.batch_statistics import threshold

MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("variant", "plus", "minus"), [("O1", True, False), ("O4", False, True), ("C2", True, True)]
)
def test_stare_variants(variant: str, plus: bool, minus: bool) -> None:
    method = Stare(variant=variant, entropy_target=None, amplify=1.5, attenuate=0.5)  # type: ignore[arg-type]
    batch = token_batch(MIXED, method=method)
    statistics = ask(method, batch)
    weights = method.weights(batch, statistics, state_of(method))
    assert bool((weights[batch.advantage > 0] == 1.5).any()) == plus
    assert bool((weights[batch.advantage < 0] == 0.5).any()) == minus
    assert set(weights.tolist()) <= {1.0, 1.5, 0.5}
    assert {
        name for name in method.metrics(statistics, state_of(method)) if "selected" in name
    } == {f"stare/selected_{side}" for side, on in (("plus", plus), ("minus", minus)) if on}


@pytest.mark.parametrize(("share", "count"), [(0.0, "none"), (1.0, "all")])
def test_stare_takes_none_or_all(share: float, count: str) -> None:
    method = Stare(share=share, entropy_target=None, amplify=2.0)
    batch = token_batch(MIXED, method=method)
    weights = method.weights(batch, ask(method, batch), state_of(method))
    want = torch.where((batch.advantage > 0) & (count == "all"), 2.0, 1.0)
    assert torch.equal(weights, want)


def test_stare_reads_the_log_prob_that_selections_are_given() -> None:
    method = Stare(entropy_target=None, share=0.01, amplify=2.0)
    batch = token_batch(MIXED, method=method)
    row = int((batch.advantage > 0).nonzero()[0])
    given = torch.zeros_like(batch.old_log_prob)
    given[row] = -3.0
    batch.selection_log_prob = given
    weights = method.weights(batch, ask(method, batch), state_of(method))
    assert weights[row] == 2.0
    assert int((weights == 2.0).sum()) == 1


def test_stapo_silences_nothing_without_a_candidate() -> None:
    method = Stapo(tau_p=1e-9)
    batch = token_batch(MIXED, method=method)
    plain = Grpo(clip_high=0.28, aggregation="token_mean")
    torch.testing.assert_close(loss_and_gradient(method, batch), loss_and_gradient(plain, batch))


def test_stapo_divides_by_the_tokens_it_kept() -> None:
    method = Stapo(tau_p=0.5)
    batch = token_batch(MIXED, method=method, off_policy=0.0)
    kept, gradient = loss_and_gradient(method, batch)
    everything, _ = loss_and_gradient(replace(method, denominator="all"), batch)
    silenced = gradient == 0
    assert 0 < int(silenced.sum()) < len(silenced)
    assert (batch.advantage[silenced] > 0).all()
    torch.testing.assert_close(everything * len(silenced), kept * int((~silenced).sum()))


def test_stapo_then_stare_selects_among_the_kept() -> None:
    mask = SpuriousTokens(tau_p=0.5, quantile=1.0)  # every candidate but the one of largest entropy
    method = StapoStare(spurious=mask, entropy_target=None, amplify=2.0, share=0.2)
    batch = token_batch(MIXED, method=method, off_policy=0.0)
    statistics = ask(method, batch)
    kept = method.narrowed(batch, statistics).kept
    rare = threshold(statistics, "plus").select(
        batch.surprisal, batch.index, kept.loss_mask & (batch.advantage > 0)
    )
    assert int(threshold(statistics, "plus").n) == int(
        (kept.loss_mask & (batch.advantage > 0)).sum()
    )
    # with STARE alone the silenced tokens, being the least probable, would have been chosen
    alone = Stare(entropy_target=None, amplify=2.0, share=0.2)
    other = ask(alone, batch)
    chosen = threshold(other, "plus").select(batch.surprisal, batch.index, batch.advantage > 0)
    assert bool((chosen & ~kept.loss_mask).any())
    assert not bool((rare & ~kept.loss_mask).any())


def test_the_gate_reads_all_response_tokens_unless_told_otherwise() -> None:
    mask = SpuriousTokens(tau_p=0.5, quantile=1.0)
    batch = token_batch(MIXED, method=Grpo())
    means = {}
    for which in ("response", "kept"):
        method = StapoStare(spurious=mask, gate_entropy=which)  # type: ignore[arg-type]
        means[which] = float(ask(method, batch)["entropy"])  # type: ignore[arg-type]
    assert means["response"] == pytest.approx(float(batch.entropy.double().mean()))
    assert means["kept"] > means["response"]  # tokens of low entropy were silenced


def test_twenty_entropy_trains_on_forks_alone() -> None:
    method = TwentyEntropy(share=0.2)
    batch = token_batch(MIXED, method=method, off_policy=0.0)
    kept, gradient = loss_and_gradient(method, batch)
    n = len(batch.loss_mask)
    k = max(1, int(n * 0.2 + 0.9999))
    forks = batch.entropy.argsort(descending=True)[:k]
    assert set(gradient.nonzero().squeeze(1).tolist()) == set(forks.tolist())
    everything, _ = loss_and_gradient(replace(method, denominator="all"), batch)
    torch.testing.assert_close(everything * n, kept * k)


def test_twenty_entropy_leaves_groups_without_advantage_out() -> None:
    method = TwentyEntropy(share=0.5)
    batch = token_batch([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], method=method)
    solved = batch.sequence >= 4
    batch.entropy = torch.where(solved, 100.0, batch.entropy)
    _, gradient = loss_and_gradient(method, batch)
    assert gradient[solved].abs().max() == 0
    assert gradient[~solved].abs().max() > 0


def test_the_draw_belongs_to_the_token_and_not_to_the_order() -> None:
    index = torch.arange(5000)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(3, 1, index)[order], uniform(3, 1, index[order]))
    draws = [uniform(seed, step, index) for seed, step in ((3, 1), (3, 2), (4, 1))]
    for draw in draws:
        assert 0 <= float(draw.min()) < 0.01
        assert 0.99 < float(draw.max()) < 1
        assert float(draw.mean()) == pytest.approx(0.5, abs=0.02)
    assert len({tuple(draw[:20].tolist()) for draw in draws}) == 3
    assert abs(float(torch.corrcoef(torch.stack(draws))[0, 1])) < 0.05


def test_clip_cov_draws_the_same_tokens_in_any_order() -> None:
    method = ClipCov(share=0.1, cov_low=0.0, seed=5)
    batch = token_batch(MIXED, method=method)
    order = torch.randperm(len(batch.loss_mask), generator=torch.Generator().manual_seed(1))
    _, gradient = loss_and_gradient(method, batch)
    _, shuffled = loss_and_gradient(method, batch.select(order))
    assert torch.equal(gradient[order] == 0, shuffled == 0)
    drawn = threshold(ask(method, batch), "drawn")
    assert int(drawn.k) == max(1, int(0.1 * len(batch.loss_mask)))
    assert int((gradient == 0).sum()) == int(drawn.k)
    batch.step += 1
    assert not torch.equal(loss_and_gradient(method, batch)[1] == 0, gradient == 0)


def test_clip_cov_draws_no_more_than_there_are() -> None:
    method = ClipCov(share=1.0, cov_low=1e6, cov_high=1e7)
    batch = token_batch(MIXED, method=method)
    assert int(threshold(ask(method, batch), "drawn").k) == 0
    assert (loss_and_gradient(method, batch)[1] != 0).all()


def test_kl_cov_is_inert_on_policy_and_holds_off_policy() -> None:
    for off_policy, inert in ((0.0, True), (0.3, False)):
        held = KlCov(share=0.2, coef=1.0)
        batch = token_batch(MIXED, method=held, off_policy=off_policy)
        same = torch.equal(
            loss_and_gradient(held, batch)[1], loss_and_gradient(replace(held, coef=0.0), batch)[1]
        )
        assert same == inert
