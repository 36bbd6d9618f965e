"""A place among ranks that do not exist, on the meta device: what is built there is what the rank would build."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_stare.config.schema import ParallelConfig
from megatron_stare.megatron.backend.cpu_backend import on_meta
from megatron_stare.megatron.backend.layout import Layout, cut_world, leave
from megatron_stare.megatron.backend.substitute import substituted

NO_WAIT_S = 1.0  # of collectives that return at once


@contextlib.contextmanager
def pretend(parallel: ParallelConfig, rank: int) -> Iterator[Layout]:
    """While open, this process is the rank, and its device the meta device. Collectives return at once and bring
    nothing of other ranks, so this is for building only."""
    # torch wraps the hook of errors that end the process with every process group
    hook = substituted(sys, "excepthook", sys.excepthook)
    with on_meta(), hook, substituted(dist, "new_group", _fake_group):
        dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
        try:
            yield cut_world(parallel, rank, timeout_s=NO_WAIT_S)
        finally:
            leave()


_new_group = dist.new_group


def _fake_group(*args: Any, **options: Any) -> Any:
    """A group of the world's backend where gloo is asked for by name: gloo would wait for the other ranks."""
    return _new_group(*args, **{**options, "backend": None})
