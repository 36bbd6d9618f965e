"""Measures the memory of processes, and keeps freed memory for reuse.

`tree_pss_bytes` sums a run and its child processes, for the metric memory/tree_pss_gb. It uses
proportional set size (Pss), which may be summed: a page shared by n processes, such as libtorch or
Ray's object store, counts as 1/n in each. Resident size would count the page n times.

`freeze` hides long-lived objects from Python's garbage collector: libraries, models, settings. A
full collection visits every object (a few hundred thousand from torch and transformers alone) in
the middle of a step, and a rank that collects delays all others.

`keep_freed` keeps the memory that a training step on a CPU frees, so that the next step can reuse
the memory. By default glibc returns freed memory to the system, which then clears every page again.
The clearing takes a tenth of a small model's step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"  # proc(5)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 32 * 2**20  # bytes; larger allocations always get their own pages, a limit of glibc
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it


def take_peak_bytes() -> int | None:
    """Returns this process's peak memory in bytes since the last call, and restarts the peak.

    On CUDA the peak is that of torch's allocator. Without CUDA the peak is that of the resident
    size, in which a page shared with other processes counts in full. Returns None if the kernel
    does not report the resident size's peak; only Linux reports this peak.
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
    """Returns the bytes that all processes hold on this rank's GPU now; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def keep_freed() -> None:
    """Keeps freed host memory in this process from now on, for later tensors.

    Sets two limits of malloc, and needs both. M_MMAP_THRESHOLD makes allocations up to `_LARGEST`
    come from the heap. M_TRIM_THRESHOLD keeps malloc from returning the heap's end to the system.
    """
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def freeze() -> None:
    """Excludes all current objects from future garbage collections. Collects garbage before that,
    because a frozen object is never freed by the collector."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Undoes any `freeze` on exit, since the process may outlive the run."""
    try:
        yield
    finally:
        gc.unfreeze()


def tree_pss_bytes(pid: int | None = None, extra_pids: Iterable[int] = ()) -> int | None:
    """Returns the Pss of a process and its descendants in bytes; None if the kernel does not report
    it (only Linux does).

    Ray's local head, raylet and actors descend from the driver that called ray.init(). Processes
    that vanish while being read, or belong to another user, count as 0.

    Args:
        pid: root of the tree; default this process.
        extra_pids: roots of further trees that do not descend from `pid` (a cluster started
            elsewhere).
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
    """Memory that a fork shares instead of copying on write: this process's shared mappings, as the
    kernel lists them now (proc_pid_maps(5))."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as lines:
            words = [line.split(maxsplit=2) for line in lines]
        bounds = [where.split("-") for where, access, _ in words if access.endswith("s")]
        self._bounds = [(int(first, 16), int(end, 16)) for first, end in bounds]

    def overlap(self, address: int, nbytes: int) -> bool:
        """Returns True if any of the `nbytes` bytes from `address` is shared."""
        return any(address < end and first < address + nbytes for first, end in self._bounds)
