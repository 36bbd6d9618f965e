"""How much engine and trainer differ, and who is blamed for it."""

import pytest
import torch

from megatron_stare.rollout.agreement import (
    AgreementError,
    Difference,
    agreement_metrics,
    canary_batch,
    canary_differences,
    canary_verdict,
    limit_of,
    require_agreement,
    rollout_difference,
    rollout_verdict,
)

LIMIT = 1e-3
CANARY = canary_batch(vocab_size=37, sequences=4, longest=32)
POSITIONS = torch.cat([torch.arange(n) for n in CANARY.response_lengths.tolist()])
SEQUENCES = torch.repeat_interleave(torch.arange(4), CANARY.response_lengths)


def difference(values):
    return Difference(values, POSITIONS, SEQUENCES)


def noise(scale, seed=0):
    return scale * torch.randn(POSITIONS.numel(), generator=torch.Generator().manual_seed(seed))


QUIET = difference(noise(1e-7))


def test_the_canary_is_the_same_in_every_run_and_ragged():
    again = canary_batch(vocab_size=37, sequences=4, longest=32)
    assert torch.equal(again.tokens, CANARY.tokens)
    assert CANARY.lengths.tolist() == [32, 24, 16, 8]
    assert int(CANARY.tokens.max()) < 37
    assert canary_batch(37, 0, 32).size == 0


def test_differences_are_taken_token_by_token():
    trainer = noise(1.0)
    lists = [x.tolist() for x in (trainer + 0.25).split(CANARY.response_lengths.tolist())]
    (found,) = canary_differences(CANARY, trainer, [lists])
    torch.testing.assert_close(found.values, torch.full_like(trainer, 0.25), atol=1e-6, rtol=0)
    assert torch.equal(found.positions, POSITIONS)


def test_metrics_by_quantile_position_and_age():
    values = torch.zeros(POSITIONS.numel())
    values[POSITIONS == 9] = 0.5
    values[0] = -0.25
    versions = torch.full(POSITIONS.shape, 6)
    versions[0] = 5
    metrics = agreement_metrics(difference(values), versions, step=7)
    assert metrics["agreement/max"] == 0.5
    assert metrics["agreement/p50"] == 0.0
    assert metrics["agreement/max_from_position_0"] == 0.25
    assert metrics["agreement/max_from_position_1"] == 0.0
    assert metrics["agreement/max_from_position_8"] == 0.5
    assert (metrics["agreement/max_of_age_1"], metrics["agreement/max_of_age_2"]) == (0.5, 0.25)
    assert "agreement/max_from_position_64" not in metrics


def test_tokens_that_were_not_sampled_are_left_out():
    batch = canary_batch(37, 2, 8)
    batch.sampled[0] = False
    trainer = torch.zeros(batch.sampled.numel())
    trainer[0] = 9.0
    assert rollout_difference(batch, trainer).largest == 0.0


@pytest.mark.parametrize(
    ("blamed", "servers"),
    [
        (None, [QUIET, QUIET]),
        ("weights of engine 1", [QUIET, difference(noise(0.1))]),
        ("the weights are", [difference(noise(0.1)), difference(noise(0.1, 1))]),
        ("positions", [difference(noise(0.1) * (POSITIONS > 0))]),
        ("padding", [difference(noise(0.1) * (SEQUENCES > 0))]),
        ("the weights are", [difference(torch.full(POSITIONS.shape, torch.nan))]),
    ],
)
def test_what_the_canary_shows(blamed, servers):
    verdict = canary_verdict(servers, LIMIT)
    assert (verdict is None) if blamed is None else (verdict is not None and blamed in verdict)


@pytest.mark.parametrize(
    ("blamed", "sampled", "unscaled", "temperature"),
    [
        ("the temperature is", noise(0.3), noise(1e-7), 0.7),
        ("sampling support", noise(0.3).abs(), noise(0.3), 1.0),
        ("cache or batching", noise(0.3) * (POSITIONS > 0), noise(0.3), 1.0),
        ("a penalty or a bias", noise(0.3), noise(0.3), 1.0),
    ],
)
def test_what_sampled_tokens_show(blamed, sampled, unscaled, temperature):
    assert blamed in rollout_verdict(difference(sampled), difference(unscaled), temperature, LIMIT)


def test_a_run_stops_past_the_limit_and_at_nan():
    require_agreement("x", 1e-4, LIMIT, "", "step 3")
    for bad in (2e-3, float("nan")):
        with pytest.raises(AgreementError, match=r"the limit is 0\.001; weights"):
            require_agreement("x", bad, LIMIT, "weights", "step 3")
    assert limit_of(None, "float32") < limit_of(None, "bfloat16")
    assert limit_of(0.2, "float32") == 0.2
