"""The hash that SGLang's GPU servers report, as this project's formula computes it where a tensor
lies.

On a CPU the formula equals SGLang's own kernel (tests/rollout/test_sglang_hash.py); here the device
must give the same values. Where SGLang is installed its kernel runs beside.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from clock import fastest
from torch import Tensor
from verdict import Bound

from megatron_stare.rollout.engines.sglang.served_hash import digest_on

GPU_ONLY = ("share of the copy bandwidth",)
BOUNDS: dict[str, Bound] = {
    "values that differ": ("<=", 0.0),
    "share of the copy bandwidth": (">=", 0.02),  # a bucket of 64 MB in a millisecond
}
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
)
SIZES = (0, 1, 3, 4097, 8192, 8193, 40 * 8192 + 5)


def run(cpu: bool) -> dict[str, Any]:
    where, count = ("cpu", 1 << 18) if cpu else ("cuda", 1 << 28)
    noise = torch.Generator().manual_seed(0)
    tensors = [
        torch.randint(0, 2, (size * dtype.itemsize,), dtype=torch.uint8, generator=noise).view(
            dtype
        )
        for dtype in DTYPES
        for size in SIZES
    ]
    tensors += [torch.randn(65, 33, generator=noise).t(), torch.randn(999, generator=noise)[::3]]
    on_host = [hashed(tensor) for tensor in tensors]
    there = [tensor.to(where) for tensor in tensors]
    computed = [[hashed(tensor) for tensor in there], *([sglang_s(there)] if kernel() else [])]
    big = torch.randn(count, generator=noise).to(where)
    copied = fastest(lambda: big.clone())
    seconds = fastest(lambda: hashed(big))
    return {
        "figures": {
            "values that differ": float(sum(differing(on_host, found) for found in computed)),
            "share of the copy bandwidth": copied / seconds / 2,  # a copy moves every byte twice
            "seconds a GB": seconds / big.nbytes * 1e9,
        },
        "tensors": len(tensors),
        "SGLang's kernel ran": kernel(),
    }


def hashed(tensor: Tensor) -> str:
    """Hash of a tensor, as a GPU server reports it."""
    digest = digest_on("cuda")
    digest.update(tensor)
    return digest.hexdigest()


def differing(wanted: list[str], found: list[str]) -> int:
    return sum(a != b for a, b in zip(wanted, found, strict=True))


def kernel() -> bool:
    """Tells whether SGLang's own kernel can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("sglang") is not None


def sglang_s(tensors: list[Tensor]) -> list[str]:
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    return [f"{gpu_tensor_hash(tensor.contiguous().flatten()):016x}" for tensor in tensors]
