"""Collects facts about one machine. Other modules check these facts. The facts are versions,
limits, devices and environment variables. The function `look_at_folder` also tests renames, locks
and the write speed in one folder."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_stare.process.versions import nccl_release, versions

PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "flash-attn",
    "ray",
    "transformers",
    "numpy",
)
# environment variables that a run or its libraries read
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_SOCKET_IFNAME",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "http_proxy",
    "https_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "no_proxy",
    "NO_PROXY",
)
INFINIBAND, SHARED_MEMORY = Path("/sys/class/infiniband"), Path("/dev/shm")
TOOL_S = 60
WRITTEN = 32 * 2**20  # bytes written to test a folder
_SECOND_LOCK = (
    "import fcntl, sys\n"
    "file = open(sys.argv[1], 'w')\n"
    "try:\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except OSError:\n    sys.exit(1)"
)

# script that prints versions of another environment; NCCL's wheel has the CUDA release in its name
SERVED = """
import importlib.metadata, json
found = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
nccl = {name: found[name] for name in found if name.startswith("nvidia-nccl-cu")}
print(json.dumps({name: found[name] for name in ("torch", "sglang") if name in found}
                 | ({"nccl": max(nccl.items())[1]} if nccl else {})))
"""


@dataclass(frozen=True)
class Facts:
    """The facts of one machine.

    `versions`: versions by name. The names are installed packages, 'python', 'cuda' (the release
        that PyTorch was built with), 'nccl' (the loaded library) and 'driver'. Versions that cannot
        be found are left out.
    `apex_is_nvidias`: true if NVIDIA's compiled optimizers (amp_C) are installed.
    `gpus`: memory of each GPU, bytes.
    `topology`: the table of `nvidia-smi topo -m`, which is empty if there are no GPUs.
    `limits`: the soft resource limits of this process, by name. A limit of -1 means that there is
        no limit.
    `shared_memory`: the free size and the total size of /dev/shm, in bytes. Both sizes are 0 if
        there is no /dev/shm.
    `interfaces`: IPv4 addresses by interface.
    `infiniband`: names of adapters.
    `clock`: the machine's time, seconds since 1970.
    `served`: versions of 'torch', 'nccl' and 'sglang' in the servers' environment. `served` is
        empty if the run starts no server, or if the versions in the servers' environment cannot be
        read.
    """

    versions: Mapping[str, str]
    apex_is_nvidias: bool
    gpus: tuple[int, ...]
    topology: str
    limits: Mapping[str, int]
    shared_memory: tuple[int, int]
    interfaces: Mapping[str, tuple[str, ...]]
    infiniband: tuple[str, ...]
    environment: Mapping[str, str]
    clock: float
    served: Mapping[str, str] = field(default_factory=dict)


def local_facts(served_by: str | None = None) -> Facts:
    """Collects the facts about this machine that this process can see.

    Args:
        served_by: the Python interpreter of the servers' environment, or None if the run starts no
            server.
    """
    return Facts(
        versions=_versions(),
        apex_is_nvidias=importlib.util.find_spec("amp_C") is not None,
        gpus=tuple(
            int(line) * 2**20 for line in _smi("--query-gpu=memory.total").split() if line.isdigit()
        ),
        topology=_output("nvidia-smi", "topo", "-m"),
        limits={
            "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        },
        shared_memory=_shared_memory(),
        interfaces={
            name: tuple(each.address for each in addresses if each.family == socket.AF_INET)
            for name, addresses in psutil.net_if_addrs().items()
        },
        infiniband=tuple(sorted(each.name for each in INFINIBAND.iterdir()))
        if INFINIBAND.is_dir()
        else (),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        clock=time.time(),
        served=_served_versions(served_by) if served_by else {},
    )


def _served_versions(python: str) -> dict[str, str]:
    """Reads package versions in another environment, without importing the packages."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        said = subprocess.run(
            [python, "-c", SERVED], capture_output=True, text=True, timeout=TOOL_S, check=True
        )
        return dict(json.loads(said.stdout))
    return {}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **versions(PACKAGES)}
    if "torch" in found:
        import torch

        if torch.version.cuda:
            found["cuda"] = torch.version.cuda
            if (nccl := nccl_release()) is not None:
                found["nccl"] = nccl
    if driver := _smi("--query-gpu=driver_version").split():
        found["driver"] = driver[0]
    return found


def _smi(query: str) -> str:
    return _output("nvidia-smi", query, "--format=csv,noheader,nounits")


def _output(tool: str, *arguments: str) -> str:
    """Returns a tool's output, or "" if the tool is missing or fails."""
    path = shutil.which(tool)
    if path is None:
        return ""
    done = subprocess.run(
        [path, *arguments], capture_output=True, text=True, timeout=TOOL_S, check=False
    )
    return done.stdout if done.returncode == 0 else ""


def _shared_memory() -> tuple[int, int]:
    if not SHARED_MEMORY.is_dir():
        return 0, 0
    usage = shutil.disk_usage(SHARED_MEMORY)
    return usage.free, usage.total


@dataclass(frozen=True)
class FolderSeen:
    """Results of testing a folder.

    `renames`: true if a renamed folder immediately appears under its new name.
    `locks`: true if a second process cannot take a lock that another process holds.
    `mb_s`: speed of writing with sync, 10^6 bytes/s.
    `error`: the reason why the folder could not be tested.
    """

    path: str
    renames: bool = False
    locks: bool = False
    mb_s: float = 0.0
    error: str = ""


def look_at_folder(path: Path) -> FolderSeen:
    """Checks whether renaming and file locks work in a folder, and measures the folder's write
    speed. If the folder does not exist, tests its nearest existing parent instead."""
    there = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".doctor-", dir=there))
    except OSError as error:
        return FolderSeen(str(there), error=f"cannot be written: {error.strerror}")
    try:
        return FolderSeen(str(there), _renames(scratch), _locks(scratch), _speed(scratch))
    except OSError as error:
        return FolderSeen(str(there), error=f"cannot be written: {error.strerror}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def marker(path: Path) -> Iterator[Path | None]:
    """Context manager that creates a temporary file in the folder and holds the file's lock.

    Other nodes can then test whether they see the file and the lock. Yields the file's path, or
    None if the file cannot be written.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    try:
        handle, name = tempfile.mkstemp(prefix=".doctor-", dir=there)
    except OSError:
        yield None
        return
    try:
        with contextlib.suppress(OSError):  # look_at_folder reports a folder without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(name).absolute()
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)


def _renames(scratch: Path) -> bool:
    before, after = scratch / "step.tmp", scratch / "step"
    before.mkdir()
    (before / "file").write_text("whole")
    before.rename(after)
    return (after / "file").read_text() == "whole" and not before.exists()


def _locks(scratch: Path) -> bool:
    with (scratch / ".lock").open("w") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        command = [sys.executable, "-c", _SECOND_LOCK, str(scratch / ".lock")]
        return subprocess.run(command, check=False).returncode == 1


def _speed(scratch: Path) -> float:
    block = os.urandom(2**20)
    began = time.perf_counter()
    with (scratch / "file").open("wb") as file:
        for _ in range(WRITTEN // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return WRITTEN / 1e6 / (time.perf_counter() - began)
