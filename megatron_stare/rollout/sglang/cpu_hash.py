"""The hash that SGLang keys seeded sampling noise with, in plain torch: its own need Triton or a kernel package.

Used by the server, through cpu_platform.py; imports nothing of SGLang.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bits, seed 0) of the 16 bytes of seed, position and column, as SGLang's kernel computes it.

    Args:
        seed: [n] 64 bits a row.
        positions: [n] 32 bits a row.
        col_indices: [m] 32 bits a column.

    Returns:
        [n, m] uint32.
    """
    # int64 wraps around, and the low 32 bits of a product do not see the bits that are lost
    rows = seed.to(torch.int64)
    mixed = torch.zeros_like(rows)
    for block in (rows & _MASK, (rows >> 32) & _MASK, positions.to(torch.int64) & _MASK):
        mixed = _mix(mixed, block)
    mixed = _mix(mixed[:, None], col_indices.to(torch.int64) & _MASK) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & _MASK
    return (mixed ^ (mixed >> 16)).to(torch.uint32)


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = (_rotated((block * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & _MASK


def _rotated(bits: Tensor, by: int) -> Tensor:
    return ((bits << by) | (bits >> (32 - by))) & _MASK
