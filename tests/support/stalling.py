"""Parts of a run that stop getting on where a file says so: users' own, as YAML names them. STALL
is its path."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from megatron_stare.algorithms.grpo import Grpo
from megatron_stare.observability.sink import Sink

STALL = "MEGATRON_STARE_TEST_STALL"


def stalled() -> bool:
    return Path(os.environ[STALL]).exists()


class LateRank(Grpo):
    """Its second rank sleeps where the others go on to the next collective."""

    def asks(self, batch, kept, known):
        while stalled() and dist.get_rank() == 1:
            time.sleep(0.05)
        return super().asks(batch, kept, known)


class StoppedRank(Grpo):
    """Its second rank is stopped where the others go on to the next collective."""

    def asks(self, batch, kept, known):
        if stalled() and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().asks(batch, kept, known)


class Deadlocked(Sink):
    """The driver's thread takes a lock that it has."""

    def step(self, step: int, metrics: Mapping[str, float], batch: object) -> None:
        if stalled():
            lock = threading.Lock()
            with lock:
                lock.acquire()


class HeldInterpreter(Sink):
    """A C function that never returns holds the driver's interpreter: none of its threads runs any
    more."""

    def step(self, step: int, metrics: Mapping[str, float], batch: object) -> None:
        if stalled():
            ctypes.PyDLL(None).pause()
