"""Ranks in processes of their own behind the driver's interface, forked, which takes a hundredth of
what Ray's take.

They end with the driver that forked them, as Ray's actors do.
"""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from megatron_stare.errors import UserError
from megatron_stare.megatron.checkpoint.background_save import PR_SET_PDEATHSIG
from megatron_stare.process.workers import Handle, Workers

TIMEOUT_S = 120


class RankWorkers(Workers):
    """One forked process a rank. A handle is the worker it was given to; calls of one worker are
    answered in order.

    Args:
        build: makes the object of a rank, from its number.
    """

    def __init__(self, build: Callable[[int], Any], world: int) -> None:
        context = mp.get_context("fork")
        self._pipes, self._ranks = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, os.getpid(), build, rank))
            process.start()
            there.close()  # so that the rank's end is noticed
            self._pipes.append(here)
            self._ranks.append(process)

    def __len__(self) -> int:
        return len(self._ranks)

    def start_on(self, worker: int, method: str, *args: Any) -> Handle:
        try:
            self._pipes[worker].send((method, args))
        except OSError as error:
            raise UserError("a rank died") from error
        return worker

    def wait(
        self,
        handles: Sequence[Handle],
        on_done: Callable[[int], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        found: dict[int, Any] = {}
        while waiting := [self._pipes[worker] for worker in handles if worker not in found]:
            ready = wait(waiting, TIMEOUT_S)
            if not ready:
                raise UserError("a rank does not answer")
            for pipe in ready:
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError) as error:
                    raise UserError("a rank died") from error
                if not ok:
                    raise UserError(value)
                found[self._pipes.index(pipe)] = value  # type: ignore[arg-type]
        return [found[worker] for worker in handles]

    async def result(self, handle: Handle) -> Any:
        return self.wait([handle])[0]

    def share(self, value: Any) -> Handle:
        return value

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()


def _serve(pipe: Any, driver: int, build: Callable[[int], Any], rank: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        os._exit(1)
    worker = build(rank)
    while True:
        method, args = pipe.recv()
        try:
            pipe.send((True, getattr(worker, method)(*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
