"""Keeps MKL's first vector-maths call of a process off several threads at once.

ATen hands contiguous `cos`, `exp`, `log` and their like to MKL, each of its threads a chunk. MKL
2024.2, which is in torch 2.13.0, chooses its kernels in a process's first call, and under no lock:
a thread that reads while another writes takes the AVX2 low-accuracy kernel for its chunk, once,
without a word. An error of 1.5e-4 in RoPE's first `cos` is 1e-3 nats in a log-prob, and an engine
that caches its cosines keeps it. https://github.com/pytorch/pytorch/issues/188792

The packages that compute (`algorithms`, `megatron`, `ops`, `rollout`) settle the choice when they
are imported, so before anything in them runs: trainer ranks, engines, tools, benchmarks, and the
processes of servers that load this project's plug-in, have done it before torch starts a thread.
What is settled lies in the process's memory: a forked child inherits it, a spawned one imports the
package again. Done twice it costs microseconds and no more.

May go when torch's wheels carry oneMKL 2025.0 or newer, or a release that this project pins closes
the issue.
"""

from __future__ import annotations

import torch

# every function that ATen/cpu/vml.h hands to MKL
FUNCTIONS = (
    "acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp",
    "log", "log10", "log2", "sin", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


def settle() -> None:
    """Calls each function once in each precision, on one element: too few for a second thread."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
