"""Measures the memory of processes, keeps freed memory for reuse, and shortens garbage collections.

`tree_pss_bytes` sums the memory of the driver, of its child processes and of the run's other
processes on the driver's node, for the metric memory/tree_pss_gb. The sum uses the proportional set
size (Pss). If n processes share a page, such as a page of libtorch or of Ray's object store, the
page counts as 1/n in the Pss of each process. A sum of the processes' resident sizes would instead
count each shared page once per process.

`freeze` hides long-lived objects, such as libraries, models and settings, from Python's garbage
collector. A full garbage collection in the middle of a step visits every object that `freeze` has
not hidden. The libraries torch and transformers create a few hundred thousand long-lived objects.
While one rank collects garbage, all other ranks wait for this rank.

`keep_freed` keeps the memory that a training step on a CPU frees, so that the next step can reuse
the memory. By default glibc returns freed memory to the kernel. When the process allocates memory
again, the kernel fills every page with zeros. For a small model, filling pages with zeros takes a
tenth of the step time.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_BOOT, _PID_SPACE = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
_CLEAR_PEAK = "5"  # proc(5)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 32 * 2**20  # bytes; larger allocations always get their own pages, a limit of glibc
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it


def take_peak_bytes() -> int | None:
    """Returns the largest memory use of this process since the previous call, in bytes.

    On CUDA, the function returns the peak of torch's allocator. Without CUDA, the function returns
    the peak of the resident size. The resident size counts each page fully, even if the process
    shares the page with other processes. Returns None if the kernel does not report the peak of the
    resident size. Only Linux reports this peak.
    """
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    try:
        (held,) = re.findall(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        _CLEAR.write_text(_CLEAR_PEAK)
    except (OSError, ValueError):  # not Linux, or a sandbox forbids it
        return None
    return int(held) * 1024


def device_used_bytes() -> int | None:
    """Returns the memory that all processes together now use on this rank's GPU, in bytes. Returns
    None if there is no GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def keep_freed() -> None:
    """Makes malloc keep freed host memory in this process instead of returning the memory to the
    kernel. Later tensors reuse the kept memory.

    `keep_freed` sets two limits of malloc, M_MMAP_THRESHOLD and M_TRIM_THRESHOLD. Both limits are
    needed. M_MMAP_THRESHOLD makes allocations up to `_LARGEST` come from the heap. M_TRIM_THRESHOLD
    keeps malloc from returning the end of the heap to the system.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def freeze() -> None:
    """Excludes all objects that exist now from later garbage collections. First runs a garbage
    collection. Otherwise, existing garbage would be excluded as well, and would stay in memory."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Undoes the effect of `freeze` at the end of the context, because the process may continue
    after the run."""
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class Home:
    """Process id (pid) of a process, and name of the space in which the pid is unique. Two
    processes can find each other by their pids only if `space` is the same for both processes."""

    space: str
    pid: int


def own_home() -> Home:
    """Returns the `Home` of this process. On Linux, `Home.space` consists of the machine's boot id
    and the PID namespace. On other systems, `Home.space` is the host's name."""
    try:
        space = f"{_BOOT.read_text().strip()} {os.readlink(_PID_SPACE)}"
    except OSError:
        space = socket.gethostname()
    return Home(space, os.getpid())


def tree_pss_bytes(pid: int | None = None, extra_pids: Iterable[int] = ()) -> int | None:
    """Returns the total Pss of a process and its descendants, in bytes. Returns None if the kernel
    does not report the Pss. Only Linux reports the Pss.

    Ray's local head, raylet and actors are descendants of the driver that called ray.init(). A
    process counts as 0 bytes in two cases: the process ends during the measurement, or the process
    belongs to another user.

    Args:
        pid: root of the tree; default this process.
        extra_pids: roots of further trees that do not descend from `pid`, such as the workers on a
            cluster that was started elsewhere.
    """
    if not hasattr(psutil.Process().memory_full_info(), "pss"):
        return None
    processes: set[psutil.Process] = set()  # trees may overlap; each process counts once
    for root in (pid, *extra_pids):
        processes |= _tree(root)
    return sum(_pss_bytes(process) for process in processes)


def _tree(pid: int | None) -> set[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return {root, *root.children(recursive=True)}
    except psutil.Error:
        return set()


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except (psutil.Error, OSError):  # gone, a zombie, or not readable for us
        return 0


class SharedMappings:
    """List of the MAP_SHARED mappings that this process has when the object is created (see
    proc_pid_maps(5)). A forked child and its parent share the pages of MAP_SHARED mappings. When
    the child or the parent writes to a page outside the MAP_SHARED mappings, the kernel makes a
    separate copy of this page."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as lines:
            words = [line.split(maxsplit=2) for line in lines]
        bounds = [where.split("-") for where, access, _ in words if access.endswith("s")]
        self._bounds = [(int(first, 16), int(end, 16)) for first, end in bounds]

    def overlap(self, address: int, nbytes: int) -> bool:
        """Returns True if a shared mapping contains at least one of the `nbytes` bytes that start
        at `address`."""
        return any(address < end and first < address + nbytes for first, end in self._bounds)
