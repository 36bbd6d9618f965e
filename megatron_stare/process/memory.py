"""Measures the memory that processes take, and keeps what one has.

`tree_pss_bytes` sums a run and its child processes, for the metric memory/tree_pss_gb. It takes
proportional set size (Pss), which may be summed: a page shared by n processes, such as libtorch or
Ray's object store, counts as 1/n in each. Resident size would count it n times.

Python's garbage collector is kept away from what lives as long as a run: libraries, models,
settings. A full collection looks at every object there is, a few hundred thousand of torch and
transformers alone, in the middle of a step; a rank that collects keeps all others waiting. And
where a CPU computes, memory that a step frees stays with the process for the next one: glibc gives
the activations of a step back to the system, which has to clear every page anew. Of a small model's
step that was a tenth.
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
_LARGEST = 32 * 2**20  # bytes: what is larger always gets pages of its own, by a limit of glibc's
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none


def take_peak_bytes() -> int | None:
    """On CUDA what torch's allocator gave out at most, else the largest resident size, pages that
    are shared with other processes counted whole. Counts anew from here. None where the kernel does
    not tell: only Linux does."""
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    try:
        (held,) = re.findall(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        _CLEAR.write_text(_CLEAR_PEAK)
    except (OSError, ValueError):  # no Linux, or a sandbox that keeps it from us
        return None
    return int(held) * 1024


def device_used_bytes() -> int | None:
    """Bytes that all processes hold of this rank's GPU now; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def keep_freed() -> None:
    """Keeps with this process, from here on, what tensors on the host leave. Both limits are
    needed: by the one, pieces up to `_LARGEST` come from the heap; by the other, the heap's end is
    never given back."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def freeze() -> None:
    """Has the garbage collector not look again at what exists now. Garbage is collected first, as
    it would stay."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Leaves the process as it found it, whatever was frozen while it was open: it may outlive the
    run."""
    try:
        yield
    finally:
        gc.unfreeze()


def tree_pss_bytes(pid: int | None = None, extra_pids: Iterable[int] = ()) -> int | None:
    """Pss of a process and everything it started, bytes; None where the kernel does not tell: only
    Linux does.

    Ray's local head, raylet and actors are descendants of the driver that called ray.init().
    Processes that vanish while being read, or belong to someone else, count as 0.

    Args:
        pid: root of the tree; default this process.
        extra_pids: roots of further trees, for what does not descend from `pid` (a cluster started
            elsewhere).
    """
    if not hasattr(psutil.Process().memory_full_info(), "pss"):
        return None
    processes: set[psutil.Process] = set()  # trees may overlap; every process counts once
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
    except (psutil.Error, OSError):  # gone, a zombie, or not ours to read
        return 0


class SharedMappings:
    """Memory of this process that a fork shares instead of copying it on write: shared mappings, as
    the kernel lists them now (proc_pid_maps(5))."""

    def __init__(self) -> None:
        with open("/proc/self/maps") as lines:
            words = [line.split(maxsplit=2) for line in lines]
        bounds = [where.split("-") for where, access, _ in words if access.endswith("s")]
        self._bounds = [(int(first, 16), int(end, 16)) for first, end in bounds]

    def overlap(self, address: int, nbytes: int) -> bool:
        """Says whether any of so many bytes from this address on is shared."""
        return any(address < end and first < address + nbytes for first, end in self._bounds)
