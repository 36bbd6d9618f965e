"""Identifies the code of a run by the releases of packages, and by this package's commit and
digest. Identifies the device of a run by a description.

The function `computes_on` describes the device and the code of a run. Two runs compute bit-equal
numbers if three things are equal: their settings, their parallel layouts, and their texts from
`computes_on`. There are two exceptions. The numbers of two runs can differ if the runs compile
functions with torch.compile. The numbers of two runs can also differ if the device does not always
add numbers in the same order. Torch is imported only inside functions, because the command `doctor`
may run in an environment without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import re
import socket
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_stare
from megatron_stare import __version__

# reported beside torch if installed
LIBRARIES = ("megatron-core", "transformer-engine", "flash-attn")
NCCL = "libnccl.so.2"  # the soname that PyTorch links to
_TIMEOUT_S = 5.0  # git on a hanging disk must not block a run


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns a dict from the names of the given packages to their installed releases. Packages
    that are not installed are left out."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def nccl_release() -> str | None:
    """Returns the release of NCCL that this process uses, or None if PyTorch was built without
    NCCL. If PyTorch loads NCCL as a shared library, returns the release of this library. If NCCL is
    linked statically into PyTorch, returns the NCCL release with which PyTorch was built."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return loaded_nccl() or ".".join(map(str, torch.cuda.nccl.version()))


def loaded_nccl() -> str | None:
    """Returns the release of the NCCL library that this process loads, or None if there is no such
    library.

    The loaded release of NCCL may differ from the release with which PyTorch was built.
    torch.cuda.nccl.version() returns the release with which PyTorch was built.
    """
    number = ctypes.c_int()
    try:
        if ctypes.CDLL(NCCL).ncclGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):  # no library, or no version function
        return None
    base = 10000 if number.value >= 10000 else 1000  # 1000 before 2.9; see NCCL_VERSION in nccl.h
    return f"{number.value // base}.{number.value % base // 100}.{number.value % 100}"


@functools.cache
def code_digest() -> str:
    """Returns the SHA-256 of this package's Python files. The files are read only at the first call
    in a process."""
    package, digest = Path(megatron_stare.__file__).parent, hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


# in the description of a device; see `computes_on`
COMPILED, UNORDERED = "compiled functions", "sums in any order"


def computes_on(compiled: bool = False, unordered: bool = False) -> str:
    """Returns a text that contains the name of the device, the releases of the libraries, and a
    digest of this package's code. An upgrade of a library or of this package may change the order
    in which numbers are summed.

    Args:
        compiled: True if torch.compile compiles functions of the model. The compiled kernels depend
            on the sequence lengths that a process computed before, so two processes may round
            differently.
        unordered: True if the device does not always add numbers in the same order. On CUDA,
            megatron-core adds the outputs of a token's experts by atomic operations.
    """
    import torch

    libraries = (f"{name} {release}" for name, release in versions(LIBRARIES).items())
    return ", ".join(
        [
            _device(),
            *([COMPILED] if compiled else []),
            *([UNORDERED] if unordered else []),
            f"torch {torch.__version__}",
            *libraries,
            f"code {code_digest()[:12]}",
        ]
    )


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return (
            f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, cuDNN"
            f" {torch.backends.cudnn.version()}"
        )
    processor = re.search(r"^model name\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    name = processor[1] if processor else platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_info() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text() if file.exists() else ""


def origin() -> dict[str, str]:
    """Returns the current date and time, the name of this host, and the installed version of this
    package.

    The keys are `date` (local time with its offset, ISO 8601), `host`, `version` and, in a git
    checkout, `commit`. The value of `commit` ends in `+changes` if tracked files differ from the
    commit.
    """
    found = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "version": __version__,
    }
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        top = _git("rev-parse", "--show-toplevel")
        # False if an installed package is inside another repository
        if Path(top) == Path(__file__).parents[2]:
            changed = _git("status", "--porcelain", "--untracked-files=no")
            found["commit"] = _git("rev-parse", "--short=12", "HEAD") + (
                "+changes" if changed else ""
            )
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=_TIMEOUT_S,
    ).stdout.strip()
