"""The keyed noise and the draw from it."""

import itertools

import numpy as np
import pytest
import torch

from megatron_stare.rollout.engines import sampling
from megatron_stare.rollout.engines.sampling import choose_tokens, row_keys, uniforms

CHI2_99_BINS_P999 = 148.2  # 0.999 quantile, 99 degrees of freedom
CHI2_5_P999 = 20.5


def splitmix_reference(*words: int) -> int:
    """The key's hash in plain Python integers."""
    mask, state = 2**64 - 1, 0
    for word in words:
        z = ((state ^ (word & mask)) + 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        state = z ^ (z >> 31)
    return state


def test_the_hash_is_the_documented_one():
    """Pinned: another hash would change every run that is resumed under it."""
    keys = row_keys(7, 3, [0, 5, -2], [1, 0, 4])
    want = [splitmix_reference(7, 3, c, s, 11) for c, s in [(0, 1), (5, 0), (-2, 4)]]
    assert uniforms(keys, 11).tolist() == [(w >> 11) * 2.0**-53 for w in want]
    # first output of the published splitmix64 seeded with 0
    assert splitmix_reference(0) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize("walk", ["position", "sample", "cursor", "step", "seed"])
def test_uniform_along_every_component(walk):
    n = 5_000
    zeros, ramp = [0] * n, list(range(n))
    if walk == "position":
        u = np.array([uniforms(row_keys(1, 1, [1], [1]), p).item() for p in range(n)])
    elif walk in ("sample", "cursor"):
        cursors, samples = (zeros, ramp) if walk == "sample" else (ramp, zeros)
        u = uniforms(row_keys(1, 1, cursors, samples), 0).numpy()
    else:
        keys = [
            row_keys(i, 1, [1], [1]) if walk == "seed" else row_keys(1, i, [1], [1]) for i in ramp
        ]
        u = uniforms(np.concatenate(keys), 0).numpy()
    assert u.min() >= 0
    assert u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < CHI2_99_BINS_P999
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / n**0.5  # neighbours are unrelated


def test_keys_that_differ_anywhere_draw_differently():
    grid = list(
        itertools.product((0, 1, 2, 2**31 - 1), (0, 1, 2), (-1, 0, 1, 2**40), (0, 1, 2), (0, 1, 2))
    )
    drawn = [uniforms(row_keys(seed, step, [c], [s]), p).item() for seed, step, c, s, p in grid]
    assert len(set(drawn)) == len(grid)


def test_a_draw_does_not_depend_on_its_neighbours():
    cursors, samples = [4, 4, 9, 2, 7], [0, 1, 0, 3, 2]
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    keys = row_keys(3, 8, cursors, samples)
    tokens, log_probs = choose_tokens(logits, 0.7, uniforms(keys, 6))
    order = [3, 0, 4, 2, 1]
    shuffled = row_keys(3, 8, [cursors[i] for i in order], [samples[i] for i in order])
    moved, moved_log_probs = choose_tokens(logits[order], 0.7, uniforms(shuffled, 6))
    assert torch.equal(moved, tokens[order])
    assert torch.equal(moved_log_probs, log_probs[order])
    for i in range(5):
        alone, _ = choose_tokens(
            logits[i : i + 1],
            0.7,
            uniforms(row_keys(3, 8, cursors[i : i + 1], samples[i : i + 1]), 6),
        )
        assert alone.item() == tokens[i].item()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_scaled_distribution(temperature):
    n, row = 40_000, torch.tensor([0.3, -1.0, 2.0, float("-inf"), 0.0, 1.1, -0.4])
    want = torch.softmax(row / temperature, -1)
    noise = uniforms(row_keys(5, 0, range(n), [0] * n), 0)
    tokens, log_probs = choose_tokens(row.expand(n, -1), temperature, noise)
    counts = torch.bincount(tokens, minlength=7)
    assert counts[3] == 0
    alive = want > 0
    assert ((counts - n * want)[alive] ** 2 / (n * want[alive])).sum() < CHI2_5_P999
    torch.testing.assert_close(log_probs, want.log()[tokens])


@pytest.mark.parametrize(("u", "token"), [(0.0, 2), (2.0**-53, 2), (0.9, 4), (1 - 2.0**-53, 4)])
def test_tokens_of_probability_zero_are_never_drawn(u, token):
    """Also at the very ends of the noise, where the impossible tokens sit here."""
    inf = float("inf")
    logits = torch.tensor(
        [[-inf, -inf, 0.0, -inf, 1.0, -inf], [-inf, -800.0, 0.0, -inf, 0.1, -800.0]]
    )
    tokens, _ = choose_tokens(logits, 1.0, torch.full((2,), u, dtype=torch.float64))
    assert tokens.tolist() == [token, token]


def test_no_rounding_of_the_total_leaves_the_vocabulary():
    logits = torch.randn(500, 1000, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, -5:] = float("-inf")
    tokens, log_probs = choose_tokens(
        logits, 1.0, torch.full((500,), 1 - 2.0**-53, dtype=torch.float64)
    )
    assert tokens.max() < 995
    assert log_probs.isfinite().all()


def test_greedy_takes_the_likeliest_and_reports_the_scaled_log_prob():
    logits = torch.randn(8, 13, generator=torch.Generator().manual_seed(2))
    tokens, log_probs = choose_tokens(logits, 0.6, None)
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(log_probs, torch.log_softmax(logits / 0.6, -1).amax(-1))


def test_large_vocabularies_are_taken_in_blocks_without_a_trace(monkeypatch):
    logits = torch.randn(10, 50, generator=torch.Generator().manual_seed(3))
    noise = uniforms(row_keys(1, 1, range(10), [0] * 10), 0)
    whole = choose_tokens(logits, 1.0, noise)
    monkeypatch.setattr(sampling, "_BLOCK", 150)
    for a, b in zip(whole, choose_tokens(logits, 1.0, noise), strict=True):
        assert torch.equal(a, b)


def test_not_a_number_shows_in_the_log_prob_and_not_as_a_crash():
    logits = torch.zeros(2, 5)
    logits[1, 2] = float("nan")
    tokens, log_probs = choose_tokens(logits, 1.0, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert tokens.max() < 5
    assert log_probs.isnan().tolist() == [False, True]
