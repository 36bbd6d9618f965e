"""Keeps Python's garbage collector away from what lives as long as a run: libraries, models, settings.

A full collection looks at every object there is, a few hundred thousand of torch and transformers alone, in the middle
of a step; a rank that collects keeps all others waiting.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
