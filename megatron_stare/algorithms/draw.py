"""Seeded random numbers that depend on the token and not on the order of the draws. The random
numbers are therefore the same in every parallel layout."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64


def uniform(seed: int, step: int, index: Tensor) -> Tensor:
    """Returns one random number in [0, 1) for each token, a float32 tensor [N]. Each random number
    has 24 random bits. The random number of a token is a counter hash (splitmix64) of the seed, of
    the step and of the token's index in the canonical order of the whole batch. The argument
    `index`, [N] int64, contains these indices."""
    salt = _mix(_mix(seed) + step)
    z = index * _signed(_GOLDEN) + _signed(salt)  # int64 arithmetic wraps, on CPU and GPU alike
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) / 2**24


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD // 2 else word


def _mix(z: int) -> int:
    z = (z + _GOLDEN) % _WORD
    z = (z ^ (z >> 30)) * _MIX1 % _WORD
    z = (z ^ (z >> 27)) * _MIX2 % _WORD
    return z ^ (z >> 31)
