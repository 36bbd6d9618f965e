"""What decides the last bits of a rank's numbers besides its layout, in words: equal words mean equal bits."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import megatron_stare

LIBRARIES = ("megatron-core", "transformer-engine", "flash-attn")  # beside torch, where they are installed


def computes_on() -> str:
    """Device, releases of libraries, and a digest of this package's code: an upgrade may make sums in another order."""
    return ", ".join([_device(), f"torch {torch.__version__}", *_libraries(), f"code {code_digest()}"])


@functools.cache
def code_digest() -> str:
    """Of the package's modules, as they are when it is first asked for; 12 hexadecimal digits."""
    package, digest = Path(megatron_stare.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _device() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    processor = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    name = processor[1] if processor else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_info() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def _libraries() -> list[str]:
    found = []
    for library in LIBRARIES:
        try:
            found.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            continue
    return found
