"""What a process keeps: Python's garbage collector is kept away from what lives as long as a run, libraries, models,
settings; and where a CPU computes, memory that a step frees stays with the process for the next one.

A full collection looks at every object there is, a few hundred thousand of torch and transformers alone, in the middle
of a step; a rank that collects keeps all others waiting. And glibc gives the activations of a step back to the system,
which has to clear every page anew: of a small model's step that was a tenth.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 32 * 2**20  # bytes: what is larger always gets pages of its own, by a limit of glibc's
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none


def keep_freed() -> None:
    """What tensors on the host leave stays with this process from here on. Both limits are needed: by the one, pieces
    up to `_LARGEST` come from the heap; by the other, the heap's end is never given back."""
    if _mallopt is not None:
        _mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def freeze() -> None:
    """What exists now is not looked at again. Garbage is collected first, as it would stay."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Leaves the process as it found it, whatever was frozen while it was open: it may outlive the run."""
    try:
        yield
    finally:
        gc.unfreeze()
