"""Implements the operations of ops/vocab_parallel.py in Triton, for GPUs of sm_80 or newer. The
forward pass reads every logit once. The backward pass reads every logit once and writes every
logit's gradient once, possibly in place. Between reading and writing, all values are float32 in
registers.

The forward pass divides each row of logits into several blocks, and reads one block after the
other. The number m is the largest logit that the forward pass has read so far in the current row.
For each logit z, let d = (z - m) / temperature and e = exp(d). The forward pass computes four sums
over the row: s = sum(e), t = sum(d e), q = sum(e^2) and u = sum(d e^2). If the next block contains
a logit above m, the forward pass increases m and rescales the sums s, t, q and u. With h = (m_old -
m_new) / temperature, the rescaled sums are exp(h) s, exp(h) (t + h s), exp(h)^2 q and exp(h)^2 (u +
h q). The log-prob pass and the training pass run the same kernel, although only the log-prob pass
uses the sums q and u. The training pass discards q and u. A second kernel that computes only s and
t might round s and t differently. With such a kernel in the training pass, the two passes would
compute slightly different log-probs from the same weights, and the importance ratios of the first
update might differ from 1. The kernel should need no extra time for the sums q and u, because the
kernel's arithmetic should take less time than reading the logits from memory. This estimate comes
from counted instructions, not from a measurement on a GPU.

Shape legend: N = tokens, V = vocabulary columns of this rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program holds at a time, and the warps that share them. Chosen for sm_90 by
# counting (16 values a thread, two 16-byte loads of bfloat16, at most 48 registers and no spills
# as compiled for sm_80 and sm_90), not by measuring: no GPU has run these kernels yet.
FORWARD = {"BLOCK": 4096, "num_warps": 8}
BACKWARD = {"BLOCK": 4096, "num_warps": 8}

# d is clamped to this: its exp is 0, and -inf * 0 would be nan
_LOWEST = tl.constexpr(-1000.0)


@triton.jit
def _exponents(z, m, inverse_temperature):
    d = (z - m) * inverse_temperature
    return tl.where(d < _LOWEST, _LOWEST, d)  # keeps a nan


@triton.jit
def _sums(logits, row_stride, local, out, rows, real, inverse_temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    m = -float("inf")
    s = 0.0
    t = 0.0
    q = 0.0
    u = 0.0
    for first in range(0, real, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(start + column, mask=column < real, other=-float("inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(z, 0))
        finite = tl.where((new == -float("inf")) | (new == float("inf")), 0.0, new)
        h = tl.where(m == -float("inf"), 0.0, (m - finite) * inverse_temperature)
        scale = tl.exp(h)
        d = _exponents(z, finite, inverse_temperature)
        e = tl.exp(d)
        t = scale * (t + h * s) + tl.sum(d * e, 0)
        s = scale * s + tl.sum(e, 0)
        u = scale * scale * (u + h * q) + tl.sum(d * e * e, 0)
        q = scale * scale * q + tl.sum(e * e, 0)
        m = new
    target = tl.load(local + row)
    z_target = tl.load(start + target, mask=target >= 0, other=0.0).to(tl.float32)
    tl.store(out + row, m)
    tl.store(out + rows + row, s)
    tl.store(out + 2 * rows + row, t)
    tl.store(out + 3 * rows + row, z_target)
    tl.store(out + 4 * rows + row, q)
    tl.store(out + 5 * rows + row, u)


@triton.jit
def _gradient(
    logits,
    row_stride,
    out,
    out_stride,
    local,
    m,
    a,
    b,
    hit,
    width,
    real,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # programs that run together write side by side
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * row_stride + column, mask=column < real, other=-float("inf"))
    z = z.to(tl.float32)
    d = _exponents(z, tl.load(m + row), inverse_temperature)
    slope = tl.load(a + row)
    if ENTROPY:
        slope += tl.load(b + row) * d
    grad = tl.exp(d) * slope
    grad += tl.where(column == tl.load(local + row), tl.load(hit + row), 0.0)
    grad = tl.where(column < real, grad, 0.0)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=column < width)


def sums(
    logits: Tensor, local: Tensor, real: int, temperature: float, second_moment: bool
) -> Tensor:
    """Computes the row sums that vocab_reference.sums defines. Every logit is read once.

    Raises:
        ValueError: the logits are float64. Only the other implementations support float64.
    """
    logits = _rows_in_order(logits)
    rows = logits.shape[0]
    out = torch.empty(6, rows, dtype=torch.float32, device=logits.device)
    if rows:
        _sums[(rows,)](
            logits,
            logits.stride(0),
            local,
            out,
            rows,
            real,
            1 / temperature,
            **FORWARD,
        )
    return out if second_moment else out[:4]


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
    writes the gradient into `out`. Every logit is read once."""
    logits = _rows_in_order(logits)
    rows, width = logits.shape
    if out.stride(1) != 1:
        raise ValueError("the gradient must lie row by row")
    if rows == 0:
        return
    _gradient[(rows * triton.cdiv(width, BACKWARD["BLOCK"]),)](
        logits,
        logits.stride(0),
        out,
        out.stride(0),
        local,
        m,
        a.contiguous(),
        a if b is None else b.contiguous(),
        hit.contiguous(),
        width,
        real,
        1 / temperature,
        ENTROPY=b is not None,
        **BACKWARD,
    )


def _rows_in_order(logits: Tensor) -> Tensor:
    """Returns the logits as a tensor whose rows are contiguous in memory. Copies the logits only if
    their rows are not contiguous. Raises ValueError for float64."""
    if logits.dtype == torch.float64:
        raise ValueError(
            "the Triton body works in float32; take the chunked body for float64 logits"
        )
    return logits if logits.stride(1) == 1 else logits.contiguous()
