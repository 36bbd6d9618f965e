"""The most memory that this process held since it was last asked."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"  # proc(5)


def take_peak_bytes() -> int | None:
    """On CUDA what torch's allocator gave out at most, else the largest resident size, pages that are shared with other
    processes counted whole. Counts anew from here. None where the kernel does not tell: only Linux does."""
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
    """What all processes hold of this rank's GPU now; None without one."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free
