"""The seeded draw against splitmix64 in Python's integers, and against its published numbers."""

from __future__ import annotations

import torch

from megatron_stare.algorithms.draw import uniform

MASK = 2**64 - 1


def splitmix(z: int) -> int:
    """The output of splitmix64 whose state was z before (Steele, Lea and Flood 2014, as published
    by Vigna)."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_draw_is_splitmix64() -> None:
    # as published
    assert [splitmix(0), splitmix(0x9E3779B97F4A7C15)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    index = torch.tensor([0, 1, 2, 1000, 2**31, 2**40 + 3])
    for seed, step in [(0, 0), (1, 0), (0, 1), (2**31 - 1, 10_000), (123_456_789_012_345, 7)]:
        salt = splitmix((splitmix(seed) + step) & MASK)
        # the state before a token's number is drawn; the stream's own step is the golden ratio too
        words = [
            splitmix((int(i) * 0x9E3779B97F4A7C15 + salt - 0x9E3779B97F4A7C15) & MASK)
            for i in index
        ]
        assert uniform(seed, step, index).tolist() == [(word >> 40) / 2**24 for word in words]


def test_draws_fill_the_unit_interval_evenly() -> None:
    drawn = uniform(5, 3, torch.arange(100_000)).double()
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    counts = torch.histc(drawn, 10, 0, 1)
    # chi-squared with 9 degrees, 1 in 1000
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 27.9
