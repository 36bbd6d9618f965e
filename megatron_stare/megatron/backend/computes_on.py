"""What decides the last bits of a rank's numbers besides its layout, in words: equal words mean equal bits."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from megatron_stare.process.versions import code_digest, versions

LIBRARIES = ("megatron-core", "transformer-engine", "flash-attn")  # beside torch, where they are installed


def computes_on() -> str:
    """Device, releases of libraries, and a digest of this package's code: an upgrade may make sums in another order."""
    libraries = (f"{name} {release}" for name, release in versions(LIBRARIES).items())
    return ", ".join([_device(), f"torch {torch.__version__}", *libraries, f"code {code_digest()[:12]}"])


def _device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    processor = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    name = processor[1] if processor else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_info() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""
