"""The entropy sensitivity against autograd, and the forecast of a step against the step itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_stare.algorithms.sensitivity import (
    QUADRANTS,
    EntropyForecast,
    critical_surprisal,
    is_rare,
    lambert_w0,
    neutral_weight,
    second_moment,
    sensitivity,
    sensitivity_requests,
)
from megatron_stare.ops.statistics_executor import answer
from megatron_stare.ops.vocab_parallel import log_prob_and_entropy
from megatron_stare.records.batch import TokenBatch


def entropy_of(logits: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def parts(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log p [V], H, sum p^2, sum p^2 ln p)."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    return log_p, entropy_of(logits), (p * p).sum(-1), (p * p * log_p).sum(-1)


@pytest.mark.parametrize("vocabulary", [2, 5, 40])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_sensitivity_equals_autograd(vocabulary: int, scale: float) -> None:
    logits = scale * torch.randn(
        vocabulary, generator=torch.Generator().manual_seed(vocabulary), dtype=torch.float64
    )
    log_p, entropy, p2, p2_log_p = parts(logits)
    s2 = second_moment(p2, p2_log_p, entropy)
    phi = sensitivity(log_p, entropy, s2)
    logits.requires_grad_()
    slope = torch.autograd.grad(entropy_of(logits), logits)[0]
    for taken in range(vocabulary):
        direction = -log_p.exp()
        direction[taken] += 1
        assert float(slope @ direction) == pytest.approx(-float(phi[taken]), abs=1e-12)
    assert float((log_p.exp() * phi).sum()) == pytest.approx(0, abs=1e-12)
    past = -log_p > critical_surprisal(entropy, s2)
    assert torch.equal(past, phi < 0)


def test_a_uniform_distribution_is_neutral() -> None:
    log_p, entropy, p2, p2_log_p = parts(torch.zeros(8, dtype=torch.float64))
    s2 = second_moment(p2, p2_log_p, entropy)
    assert float(s2) == pytest.approx(0, abs=1e-15)
    assert float(sensitivity(log_p, entropy, s2).abs().max()) < 1e-15
    assert float(critical_surprisal(entropy, s2)) == pytest.approx(math.log(8))


def test_lambert_w0() -> None:
    w = torch.cat(
        [
            torch.linspace(-1, 5, 400, dtype=torch.float64),
            torch.tensor([20.0, 100.0], dtype=torch.float64),
        ]
    )
    x = w * w.exp()
    torch.testing.assert_close(lambert_w0(x) * lambert_w0(x).exp(), x, rtol=1e-13, atol=1e-15)
    # flat at the branch point
    torch.testing.assert_close(lambert_w0(x)[10:], w[10:], rtol=1e-12, atol=1e-12)
    assert float(lambert_w0(torch.tensor(1.0))) == pytest.approx(0.5671432904097838, abs=1e-15)
    assert lambert_w0(torch.tensor([-0.4, 0.0])).isnan().tolist() == [True, False]
    tiny = torch.tensor([1e-300, 1e-17, -1e-17], dtype=torch.float64)
    torch.testing.assert_close(lambert_w0(tiny), tiny)


def batch_of(logits: Tensor, taken: Tensor, advantage: Tensor) -> TokenBatch:
    log_p, entropy, p2, p2_log_p = parts(logits)
    own = log_p.gather(1, taken[:, None]).squeeze(1)
    n = len(taken)
    return TokenBatch(
        log_prob=own,
        old_log_prob=own,
        rollout_log_prob=own,
        entropy=entropy,
        advantage=advantage,
        loss_mask=torch.ones(n, dtype=torch.bool),
        sequence=torch.arange(n),
        position=torch.zeros(n, dtype=torch.int64),
        index=torch.arange(n),
        num_sequences=n,
        sum_p2=p2,
        sum_p2_log_p=p2_log_p,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_the_forecast_is_the_slope_of_the_step(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(50, 9, generator=generator, dtype=torch.float64)
    taken = torch.randint(0, 9, (50,), generator=generator)
    advantage = torch.randn(50, generator=generator, dtype=torch.float64)
    weight = 1 + torch.rand(50, generator=generator, dtype=torch.float64)
    batch = batch_of(logits / temperature, taken, advantage)
    push = weight * advantage / 50  # the slope of the weighted objective, a mean over tokens
    forecast = EntropyForecast.of(answer(sensitivity_requests(batch, push), None), temperature)

    def mean_entropy(eta: float) -> float:
        # the gradient in the raw logits of ln softmax(z / T) is (one_hot - p) / T
        along = (
            torch.nn.functional.one_hot(taken, 9) - (logits / temperature).softmax(-1)
        ) / temperature
        return float(
            entropy_of((logits + eta * (weight * advantage)[:, None] * along) / temperature).mean()
        )

    measured = (mean_entropy(1e-5) - mean_entropy(-1e-5)) / 2e-5
    assert float(forecast.change) == pytest.approx(measured, rel=1e-6)
    assert sum(float(x) for x in forecast.shares.values()) == pytest.approx(1)
    signs = {"common_plus": -1, "rare_plus": 1, "common_minus": 1, "rare_minus": -1}
    assert {name: (x > 0).item() for name, x in forecast.masses.items()} == {
        n: s > 0 for n, s in signs.items()
    }
    plain = EntropyForecast.of(
        answer(sensitivity_requests(batch, advantage / 50), None), temperature
    )
    assert float(plain.change) == pytest.approx(sum(float(x) for x in plain.masses.values()))
    assert (
        float(plain.plain_change)
        == float(forecast.plain_change)
        == pytest.approx(float(plain.change))
    )
    # W* on L+ makes the change zero
    rest = sum(float(plain.masses[name]) for name in QUADRANTS if name != "rare_plus")
    assert float(plain.neutral_weight) * float(plain.masses["rare_plus"]) + rest == pytest.approx(
        0, abs=1e-12
    )
    assert set(plain.metrics()) >= {"forecast/entropy_change", "forecast/mass_rare_plus"}


def test_certain_tokens_are_common_whatever_the_rounding() -> None:
    logits = torch.zeros(400, 9)
    # Phi of the first column goes below what float32 resolves
    logits[:, 0] = torch.linspace(8, 30, 400)
    column = torch.zeros(400, dtype=torch.int64)
    log_prob, entropy, p2, p2_log_p = log_prob_and_entropy(
        logits, column, vocab_size=9, second_moment=True
    )
    log_prob = (log_prob + 64) - 64  # rounded as where ln p is the difference of two larger numbers
    phi = sensitivity(log_prob, entropy, second_moment(p2, p2_log_p, entropy))
    assert (phi < 0).any()  # no argmax has a negative Phi
    assert not is_rare(phi).any()
    unlikely = log_prob_and_entropy(logits[:50], column[:50] + 1, vocab_size=9)[0]
    assert is_rare(
        sensitivity(unlikely, entropy[:50], second_moment(p2, p2_log_p, entropy)[:50])
    ).all()


def test_the_neutral_weight_by_hand() -> None:
    assert neutral_weight(torch.tensor(1.0), torch.tensor(0.0)).isnan()  # no rare tokens
    assert float(neutral_weight(torch.tensor(0.25), torch.tensor(0.5))) == 1.5
    assert float(neutral_weight(torch.tensor(-1e-3), torch.tensor(1e-3))) == 0.0


def test_the_tolerance_itself_is_common() -> None:
    assert is_rare(torch.tensor([-3e-6, -3.01e-6, 3.01e-6], dtype=torch.float64)).tolist() == [
        False,
        True,
        False,
    ]


def test_the_sums_over_the_vocabulary_are_asked_for() -> None:
    batch = batch_of(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    batch.sum_p2 = None
    with pytest.raises(ValueError, match="sum_p2"):
        sensitivity_requests(batch, torch.ones(1))
