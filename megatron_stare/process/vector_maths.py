"""Keeps a process's first vector-maths call into MKL on a single thread.

ATen passes contiguous `cos`, `exp`, `log` and similar calls to MKL, one chunk per thread. MKL
2024.2, which torch 2.13.0 contains, chooses its kernels in a process's first call, without a lock.
If one thread reads MKL's choice while another thread is still writing it, the reading thread
silently uses the AVX2 low-accuracy kernel for one chunk. An error of 1.5e-4 in RoPE's first `cos`
becomes 1e-3 nats in a log-prob, and an engine that caches its cosines keeps the error.
https://github.com/pytorch/pytorch/issues/188792

The packages that compute (`algorithms`, `megatron`, `ops`, `rollout`) call `settle` on import,
before any of their code runs. Trainer ranks, engines, tools, benchmarks, and servers that load this
project's plug-in therefore fix MKL's choice of kernels before torch starts a thread. MKL keeps the
choice of kernels in the process's memory. A forked child inherits the choice. A spawned child
imports the package, and the import calls `settle`. A second call of `settle` costs microseconds.

Remove this module once torch's wheels contain oneMKL 2025.0 or newer, or once this project pins a
torch release that closes issue 188792.
"""

from __future__ import annotations

import torch

# every function that ATen/cpu/vml.h passes to MKL
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp",
    "log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


def settle() -> None:
    """Calls each function of FUNCTIONS once in each precision. torch computes a single element on a
    single thread, so no other thread calls MKL at the same time."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
