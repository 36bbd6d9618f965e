"""Says which code this is and what it computes on: releases of packages, a digest of our own modules, the device.

Equal words of `computes_on` mean equal bits: they name what decides the last bits of a rank's numbers besides its
layout. Torch is imported there alone, since the doctor runs where it may be missing.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_stare

LIBRARIES = ("megatron-core", "transformer-engine", "flash-attn")  # beside torch, where they are installed


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@functools.cache
def code_digest() -> str:
    """SHA-256 of the package's modules, as they are when it is first asked for."""
    package, digest = Path(megatron_stare.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def computes_on() -> str:
    """Device, releases of libraries, and a digest of this package's code: an upgrade may make sums in another order."""
    import torch

    libraries = (f"{name} {release}" for name, release in versions(LIBRARIES).items())
    return ", ".join([_device(), f"torch {torch.__version__}", *libraries, f"code {code_digest()[:12]}"])


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    processor = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    name = processor[1] if processor else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_info() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""
