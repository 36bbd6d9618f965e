"""What a plan knows of a device, each number from where its maker gives it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_stare.errors import unknown_name


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    memory: bytes, as the data sheet counts them; a driver reports a little more.
    flops: of dense bfloat16 products, a second.
    bandwidth: of its memory, bytes a second.
    link: to the other GPUs of its node, bytes a second in one direction, half of what data sheets give for both.
    source: of all of these.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    link: float
    source: str


_SXM = "NVIDIA's data sheet, SXM"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80g", 80 * 10**9, 312e12, 2.039e12, 300e9, f"{_SXM}: A100 80GB"),
        Gpu("h100-80g", 80 * 10**9, 989e12, 3.35e12, 450e9, f"{_SXM}: H100, without sparsity"),
        Gpu("h200-141g", 141 * 10**9, 989e12, 4.8e12, 450e9, f"{_SXM}: H200, without sparsity"),
        Gpu("b200-180g", 180 * 10**9, 2250e12, 8.0e12, 900e9, "NVIDIA's data sheet, DGX B200: an eighth of it, dense"),
        Gpu("cpu-core", 8 * 10**9, 200e9, 50e9, 50e9, "nominal: only of use with --calibrate"),
    )
}
CPU = GPUS["cpu-core"]
NETWORK = 50e9  # bytes a second of a GPU to other nodes: 400 Gbit/s each, as DGX H100 has; an assumption
HOST_LINK = 25e9  # bytes a second between a GPU and host memory: PCIe 5.0 x16 at 40 %; an assumption


def find_gpu(name: str, where: str = "--gpu") -> Gpu:
    """Raises ConfigError, with what is meant, for a name that is not in the table."""
    if name not in GPUS:
        raise unknown_name(name, GPUS, where)
    return GPUS[name]
