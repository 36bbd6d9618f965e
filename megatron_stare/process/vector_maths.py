"""Ensures that a process makes its first calls of MKL's vector maths from a single thread.

ATen splits a large contiguous tensor into chunks to compute `cos`, `exp`, `log` and similar
functions. Several threads compute different chunks at the same time, so several threads call MKL at
the same time. MKL 2024.2, which torch 2.13.0 contains, chooses its kernels during a process's first
call, and does not protect this choice by a lock. If one thread reads MKL's choice of kernels before
another thread has written this choice completely, the reading thread uses the AVX2 low-accuracy
kernel for one chunk. MKL reports no error. An error of 1.5e-4 in RoPE's first `cos` becomes an
error of 1e-3 nats in a log-prob. If an engine caches RoPE's cosines, an inaccurate cosine stays in
the engine's cache and affects later log-probs too. See
https://github.com/pytorch/pytorch/issues/188792

The packages `algorithms`, `megatron`, `ops` and `rollout` compute with torch. Each of these four
packages calls `settle` when the package is imported, before any other code of the package runs.
MKL's choice of kernels is therefore fixed before torch starts a thread. Trainer ranks and engines
import at least one of the packages `algorithms`, `megatron`, `ops` and `rollout`. Every tool or
benchmark that computes with torch either imports one of the packages `algorithms`, `megatron`,
`ops` and `rollout`, or calls `settle` itself. A server that loads this project's plug-in also calls
`settle` on import. MKL keeps the choice of kernels in the process's memory. A forked child inherits
its parent's choice of kernels. A spawned child imports the package, and the import calls `settle`.
Further calls of `settle` in the same process cost microseconds.

Remove this module when torch's wheels contain oneMKL 2025.0 or newer, or when this project pins a
torch release in which PyTorch's issue 188792 is fixed.
"""

from __future__ import annotations

import torch

# every function that ATen/cpu/vml.h passes to MKL
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp",
    "log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


def settle() -> None:
    """Calls each function of FUNCTIONS once in float32 and once in float64. Each call computes an
    array of one element. torch computes an array of one element in a single thread, so no other
    thread calls MKL at the same time."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
