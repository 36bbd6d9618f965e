"""Rounds, and what is carried over, by worked numbers and against the rule of partial rollouts
drawn at random."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_stare.planning.partial_flow import PartialFlow, partial_flow


def test_all_that_is_under_way_is_waited_for() -> None:
    """With as many groups as a step takes, a step has the rounds of the longest response and
    carries nothing over. With q = exp(-10 / 20) the share q^k of the responses grows on after k
    rounds, the last of which ends at 40 tokens."""
    found, q = partial_flow(8, 4, 8, 10, 20.0, 40), math.exp(-0.5)
    grown = [q**k for k in range(4)]
    assert found.rounds == 4 and found.continued == found.carried == 0
    assert found.growing == pytest.approx(8 * 4 * sum(grown) / 4)
    assert found.held == pytest.approx(
        8 * 4 * sum(share * 10 * (k + 1) for k, share in enumerate(grown)) / 4
    )


def test_a_step_of_one_round() -> None:
    """So many under way that a round always gives a step's groups, of one response each, of which 1
    - q, q (1 - q) and q^2 take one, two and three rounds. Of x groups begun a step the rounds'
    share is whole: with nothing waiting x = 4 would need x (1 + q + q^2) under way; here are
    exactly as many, and q x are carried over with 10 tokens each, q^2 x with 20."""
    q = math.exp(-0.5)
    share = 1 + q + q * q
    found = partial_flow(400, 1, math.ceil(400 * share), 10, 20.0, 30)
    assert found.rounds == 1
    assert found.continued == pytest.approx(400 * (q + q * q), rel=2e-3)
    assert found.carried == pytest.approx(400 * (10 * q + 20 * q * q), rel=2e-3)
    assert found.growing == pytest.approx(400 * share, rel=2e-3)


def drawn(
    groups: int, samples: int, under_way: int, tokens: int, mean: float, longest: int
) -> PartialFlow:
    """The rule itself, for 400 steps of lengths that are drawn; means over the last 300."""
    draw = np.random.default_rng(7)
    length = done = np.zeros((0, samples))
    rounds = growing = continued = carried = held = 0.0
    for step in range(400):
        counts = step >= 100
        fresh = under_way - len(length)
        cut = done < length
        continued, carried = continued + counts * cut.sum(), carried + counts * done[cut].sum()
        length = np.concatenate(
            [length, np.minimum(draw.exponential(mean, (fresh, samples)), longest)]
        )
        done = np.concatenate([done, np.zeros((fresh, samples))])
        whole = np.zeros(len(length), dtype=bool)
        while whole.sum() < groups:
            on = done < length
            growing, held = growing + counts * on.sum(), held + counts * (done[on] + tokens).sum()
            done = np.where(on, done + tokens, done)
            rounds, whole = rounds + counts, (done >= length).all(axis=1)
        left = np.delete(np.arange(len(length)), np.flatnonzero(whole)[:groups])
        length, done = length[left], done[left]
    return PartialFlow(
        rounds / 300, growing / rounds, continued / 300, carried / 300, held / rounds
    )


@pytest.mark.parametrize(
    "asked",
    [(64, 8, 128, 2048, 2000.0, 8192), (64, 8, 256, 1024, 2000.0, 8192)],
)
def test_the_flow_is_that_of_the_rule(asked: tuple[int, int, int, int, float, int]) -> None:
    """Within the noise of whole groups, of which a step must have enough: drawn ones now and then
    need a round more or less, where expected ones do not."""
    found, expected = partial_flow(*asked), drawn(*asked)
    assert found.rounds == pytest.approx(expected.rounds, rel=0.05)
    assert found.growing == pytest.approx(expected.growing, rel=0.03)
    assert found.held == pytest.approx(expected.held, rel=0.05)
    assert found.continued == pytest.approx(expected.continued, rel=0.05)
    assert found.carried == pytest.approx(expected.carried, rel=0.05)
