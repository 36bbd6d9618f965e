"""Seconds on whatever device there is, and results that are exact, or the same twice. Needs PyTorch
alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def exact_products() -> None:
    """float32 products in float32, where a GPU would take TF32. Before the process's first
    product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which `repeatable` wants
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # Transformer Engine reads no flag of torch
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """The same step twice gives the same bits, as fused attention's backward, which adds in any
    order, does not."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def fastest(once: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds of the quickest of several, after a first one that counts for nothing."""
    taken = []
    for _ in range(1 + repeats):
        start = now()
        once()
        taken.append(now() - start)
    return min(taken[1:])
