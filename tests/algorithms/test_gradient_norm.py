"""The norm of the gradient in the logits against autograd, STAPO's bounds around it, and the
proxy's precision."""

from __future__ import annotations

import math

import pytest
import torch
from support.token_batches import ask, state_of
from test_sensitivity import batch_of, parts
from torch import Tensor

from megatron_stare.algorithms.gradient_norm import (
    CELLS,
    ENTROPIES,
    PROBABILITIES,
    cell_metrics,
    cell_requests,
    lower_bound,
    norm_metrics,
    norm_requests,
    squared_norm,
    upper_bound,
)
from megatron_stare.algorithms.proxy import proxy_metrics, proxy_requests
from megatron_stare.algorithms.sensitivity import critical_surprisal, second_moment
from megatron_stare.algorithms.stare import Stare
from megatron_stare.ops.statistics_executor import answer

T = 0.7


def drawn(rows: int, vocabulary: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [rows, vocabulary], the tokens taken, and advantages."""
    generator = torch.Generator().manual_seed(5)
    logits = scale * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    taken = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    return logits, taken, torch.randn(rows, generator=generator, dtype=torch.float64)


def test_worked_numbers() -> None:
    """p = (1/2, 1/4, 1/4): H = 1.5 ln 2, sum of squares 3/8, C_3 = 2 / (3 ln^2 3)."""
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    entropy = torch.full((3,), 1.5 * math.log(2), dtype=torch.float64)
    assert squared_norm(p.log(), (p * p).sum().expand(3)).tolist() == pytest.approx(
        [0.375, 0.875, 0.875]
    )
    low, bend = math.exp(-1.5 * math.log(2)), 2 / (3 * math.log(3) ** 2) * (1.5 * math.log(2)) ** 2
    assert lower_bound(p.log(), entropy).tolist() == pytest.approx([low, 0.5 + low, 0.5 + low])
    assert upper_bound(p.log(), entropy, 3).tolist() == pytest.approx(
        [1 - bend, 1.5 - bend, 1.5 - bend]
    )


@pytest.mark.parametrize("vocabulary", [2, 7, 300])
@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0])
def test_the_bounds_hold_for_every_distribution(vocabulary: int, scale: float) -> None:
    logits, taken, _ = drawn(200, vocabulary, scale)
    log_p, entropy, p2, _ = parts(logits)
    own = log_p.gather(1, taken[:, None]).squeeze(1)
    exact = squared_norm(own, p2)
    assert (lower_bound(own, entropy) <= exact + 1e-12).all()
    assert (exact <= upper_bound(own, entropy, vocabulary) + 1e-12).all()
    if scale == 0:  # both are the norm itself where the distribution is uniform
        torch.testing.assert_close(lower_bound(own, entropy), exact)
        torch.testing.assert_close(upper_bound(own, entropy, vocabulary), exact)


def test_the_norm_is_that_of_autograd() -> None:
    logits, taken, advantage = drawn(60, 11, 2.0)
    raw = (T * logits).requires_grad_()
    batch = batch_of(logits, taken, advantage)
    batch.loss_mask[:7] = False
    push = torch.where(batch.loss_mask, 1.3 * advantage / 53, 0.0)
    own = (raw / T).log_softmax(1).gather(1, taken[:, None]).squeeze(1)
    (slope,) = torch.autograd.grad((push * own).sum(), raw)
    statistics = answer(norm_requests(batch, push, 11), None)
    found = norm_metrics(statistics, T)
    assert float(found["gradient/logit_norm"]) == pytest.approx(float(slope.norm()), rel=1e-12)
    assert (
        found["gradient/logit_norm_low"]
        < found["gradient/logit_norm"]
        < found["gradient/logit_norm_high"]
    )
    entropy, own = batch.entropy, own.detach()
    for name, bound in (
        ("low", lower_bound(own, entropy)),
        ("high", upper_bound(own, entropy, 11)),
    ):
        want = float((push**2 * bound).sum().sqrt()) / T
        assert float(found[f"gradient/logit_norm_{name}"]) == pytest.approx(want, rel=1e-12)


def test_the_share_of_improbable_tokens() -> None:
    """Improbable tokens are counted in right answers alone, before any weight or mask; STAPO
    silences some of them."""
    p = torch.tensor([0.001, 0.001, 0.0021, 0.5], dtype=torch.float64)
    logits = torch.stack([p.log(), (1 - p).log()], dim=1)
    batch = batch_of(
        logits, torch.zeros(4, dtype=torch.int64), torch.tensor([2.0, -1.0, 1.0, 1.0]).double()
    )
    found = norm_metrics(answer(norm_requests(batch, torch.zeros(4), 2), None), 1.0)
    square = 2 * (1 - p) ** 2  # of one_hot - p, where there are two entries
    weighted = square * torch.tensor([4.0, 1.0, 1.0, 1.0])
    assert float(found["gradient/improbable_tokens"]) == 0.25
    assert float(found["gradient/improbable_square"]) == pytest.approx(
        float(weighted[0] / weighted.sum())
    )
    assert float(found["gradient/logit_norm"]) == 0.0
    batch.loss_mask[:] = False
    assert (
        float(
            norm_metrics(answer(norm_requests(batch, p, 2), None), 1.0)[
                "gradient/improbable_square"
            ]
        )
        == 0.0
    )


@pytest.mark.parametrize("variant", ["C1", "C2", "C3", "C4"])
def test_precision_and_a_phi_of_what_is_selected(variant: str) -> None:
    logits, taken, advantage = drawn(400, 9, 3.0)
    batch = batch_of(logits, taken, advantage)
    batch.loss_mask[:30] = False
    method = Stare(variant=variant, share=0.3)  # type: ignore[arg-type]
    statistics = ask(method, batch)
    selected = method.selected(batch, statistics)
    sets = method.selects
    found = proxy_metrics(answer(proxy_requests(batch, sets, selected), None), sets, T)
    log_p, entropy, p2, p2_log_p = parts(logits)
    own = log_p.gather(1, taken[:, None]).squeeze(1)
    critical = critical_surprisal(entropy, second_moment(p2, p2_log_p, entropy))
    s2 = (log_p.exp() ** 2 * (log_p + entropy[:, None])).sum(1)
    phi = own.exp() * (own + entropy) - s2
    weights = method.weights(batch, statistics, state_of(method))
    assert len(found) == 4
    for each in sets:
        members = batch.loss_mask & (
            (weights - (1.1 if each.weight == "amplify" else 0.9)).abs() < 1e-6
        )
        members &= each.sign * advantage > 0
        right = (-own[members] > critical[members]) == each.rare
        assert 0 < int(right.sum()) <= len(right)
        assert float(found[f"forecast/precision_{each.name}"]) == pytest.approx(
            float(right.double().mean())
        )
        a_phi = float((advantage * phi)[members].sum()) / T**2
        assert float(found[f"forecast/a_phi_{each.name}"]) == pytest.approx(a_phi, rel=1e-9)
    if variant == "C2":
        assert found["forecast/a_phi_plus"] < 0 < found["forecast/a_phi_minus"]


def test_a_set_without_tokens_has_no_precision() -> None:
    logits, taken, advantage = drawn(5, 4, 1.0)
    batch = batch_of(logits, taken, -advantage.abs())
    method = Stare()
    selected = method.selected(batch, ask(method, batch))
    found = proxy_metrics(
        answer(proxy_requests(batch, method.selects, selected), None), method.selects, 1.0
    )
    assert found["forecast/precision_plus"].isnan() and float(found["forecast/a_phi_plus"]) == 0.0


def test_the_sums_over_the_vocabulary_are_asked_for() -> None:
    batch = batch_of(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    batch.sum_p2 = None
    with pytest.raises(ValueError, match="sum_p2"):
        norm_requests(batch, torch.ones(1), 3)
    with pytest.raises(ValueError, match="sum_p2"):
        proxy_requests(batch, Stare().selects, torch.zeros(1, dtype=torch.int8))
    with pytest.raises(ValueError, match="sum_p2"):
        cell_requests(batch)


def test_the_norm_of_a_token_by_its_probability_and_entropy() -> None:
    """Against one_hot - p itself, cell by cell, over every cell that a mixture of sharp and flat
    rows reaches."""
    flat, taken, _ = drawn(900, 40, 1.0)
    logits = torch.cat([flat[:300], 4 * flat[300:600], 9 * flat[600:]])
    taken[::3] = logits.argmax(1)[::3]
    taken[1::7] = logits.argmin(1)[1::7]
    batch = batch_of(logits, taken, torch.ones(900))
    batch.loss_mask[::5] = False
    found = cell_metrics(answer(cell_requests(batch), None))
    p = logits.softmax(1)
    norm = (torch.nn.functional.one_hot(taken, 40) - p).norm(dim=1)
    own, entropy = p.gather(1, taken[:, None]).squeeze(1), -(p * p.log()).sum(1)
    lows, bits = (0, 0.002, 0.05, 0.5, 0.9, math.inf), (0, 0.1, 0.5, 1.5, math.inf)
    filled = 0
    for i in range(5):
        for j in range(4):
            here = batch.loss_mask & (own >= lows[i]) & (own < lows[i + 1])
            here &= (entropy >= bits[j]) & (entropy < bits[j + 1])
            n, share = 4 * i + j, float(here.sum()) / 720
            assert float(found[f"gradient/token_share_{n}"]) == pytest.approx(share)
            mean = found[f"gradient/token_norm_{n}"]
            assert (
                float(mean) == 0
                if share == 0
                else float(mean) == pytest.approx(float(norm[here].mean()), rel=1e-5)
            )
            if share:
                filled += 1
                assert float(mean) <= math.sqrt(2 - 2 * lows[i]) + 1e-9
    assert filled >= 12 and len(found) == 2 * CELLS == 40
    assert lows[1:-1] == PROBABILITIES and bits[1:-1] == ENTROPIES


def test_a_token_on_the_end_of_a_range_is_in_the_next() -> None:
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    batch = batch_of(p.log()[None], torch.zeros(1, dtype=torch.int64), torch.ones(1))
    batch.old_log_prob = torch.tensor([0.5], dtype=torch.float64).log()
    batch.entropy = torch.tensor([1.5])
    found = cell_metrics(answer(cell_requests(batch), None))
    assert float(found["gradient/token_share_15"]) == 1.0
    batch.loss_mask[:] = False
    found = cell_metrics(answer(cell_requests(batch), None))
    assert all(float(x) == 0 for x in found.values())
