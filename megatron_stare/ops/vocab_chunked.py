"""Implements the operations of ops/vocab_parallel.py for CPUs, in PyTorch. The rows of the logits
are divided into blocks, and each block is small enough to stay in the CPU's cache. No buffer is as
large as the logits.

Half a dozen elementwise operations run on each block. Only the first operation reads the block from
memory; the other operations find the block in cache. Without blocks, every operation would read the
whole tensor from memory. The block size depends on the shape alone, so two passes over the same
logits give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of a block and of each of its two work buffers: 16 rows of 32k columns.
# benchmarks/results/head.md has the costs of other sizes. BLOCK_CUDA, for GPUs without Triton,
# is larger to save kernel launches.
BLOCK = 1 << 19
BLOCK_CUDA = 1 << 25
# Fewest rows of a block, for wide vocabularies. Threads split the rows of a sum; with 3 rows, one
# of two threads would do 2.
ROWS = 4

# d is clamped to this: its exp is 0 even in float64, and -inf * 0 would be nan
_LOWEST = -1000.0


def sums(
    logits: Tensor, local: Tensor, real: int, temperature: float, second_moment: bool
) -> Tensor:
    """Computes the row sums that vocab_reference.sums defines, one block of rows at a time."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros(6 if second_moment else 4, logits.shape[0], dtype=dtype, device=logits.device)
    if real == 0:
        out[0] = -torch.inf
        return out
    m, s, t, z_target, *squares = out.unbind(0)
    picked = logits.gather(1, local.clamp_min(0)[:, None]).squeeze(1).to(dtype)
    z_target.copy_(torch.where(local >= 0, picked, 0.0))
    for rows, d, e in _blocks(logits, real, dtype):
        z = _widened(logits[rows, :real], d)
        torch.amax(z, 1, out=m[rows])
        _exponents(z, torch.where(m[rows].isfinite(), m[rows], 0.0), temperature, d)
        torch.exp(d, out=e)
        torch.sum(e, 1, out=s[rows])
        torch.sum(d.mul_(e), 1, out=t[rows])
        if second_moment:
            torch.sum(d.mul_(e), 1, out=squares[1][rows])
            torch.sum(e.square_(), 1, out=squares[0][rows])
    return out


def gradient(
    logits: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    m: Tensor,
    a: Tensor,
    b: Tensor | None,
    hit: Tensor,
    out: Tensor,
) -> None:
    """Computes the gradient with respect to the logits, as vocab_reference.gradient defines it, and
    writes the gradient into `out`, block by block."""
    out[:, real:] = 0.0
    if real == 0:
        return
    # The target's entry is computed separately, because out may be bfloat16 and share the logits'
    # memory.
    every, target = torch.arange(logits.shape[0], device=logits.device), local.clamp_min(0)
    d_target = ((logits[every, target].to(m.dtype) - m) / temperature).clamp_min(_LOWEST)
    at_slope = a if b is None else a + b * d_target
    at_target = d_target.exp() * at_slope + hit
    for rows, d, e in _blocks(logits, real, m.dtype):
        _exponents(_widened(logits[rows, :real], d), m[rows], temperature, d)
        torch.exp(d, out=e)
        slope = a[rows, None] if b is None else d.mul_(b[rows, None]).add_(a[rows, None])
        torch.mul(e, slope, out=out[rows, :real])
    # not scatter_, which on a CPU makes a float32 copy of a whole bfloat16 tensor
    out[every, target] = torch.where(local >= 0, at_target.to(out.dtype), out[every, target])


def _blocks(
    logits: Tensor, real: int, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yields the row slice of every block, and two work buffers of the block's shape. All blocks
    use the same two buffers."""
    most = BLOCK if logits.device.type == "cpu" else BLOCK_CUDA
    height = max(ROWS, most // real)
    d = torch.empty(min(height, logits.shape[0]), real, dtype=dtype, device=logits.device)
    e = torch.empty_like(d)
    for start in range(0, logits.shape[0], height):
        rows = slice(start, min(start + height, logits.shape[0]))
        yield rows, d[: rows.stop - start], e[: rows.stop - start]


def _widened(block: Tensor, buffer: Tensor) -> Tensor:
    """Returns the block in the buffer's dtype. Returns the block itself if the block already has
    the buffer's dtype."""
    return block if block.dtype == buffer.dtype else buffer.copy_(block)


def _exponents(z: Tensor, m: Tensor, temperature: float, out: Tensor) -> None:
    """Writes (z - m) / temperature into `out`, where `z` contains logits and `m` contains the
    maximum of each row. Elements below _LOWEST are set to _LOWEST. `out` may be the tensor `z`
    itself."""
    torch.sub(z, m[:, None], out=out)
    if temperature != 1.0:
        out.div_(temperature)
    out.clamp_(min=_LOWEST)
