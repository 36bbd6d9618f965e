"""Runs a function on several gloo ranks, in processes kept between tests because importing Megatron
is slow."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
LEAVE_S = 10
MOST_THREADS = 100  # of a rank that has left its groups: it has ten, and fifty for each model kept


PRELOADED = [
    "megatron_stare.megatron.trainer",
    "megatron_stare.weights.files.hf_folder",
    "transformers.models.auto",
]


def forking_context() -> Any:
    """Context whose processes are forked from one that has imported Megatron: each would need
    seconds to import it."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankPool:
    """Processes that become rank 0..world-1 of a new process group for every call.

    Args:
        with_children: the ranks start processes of their own (as checkpoint writers do), which
            daemons may not.
    """

    def __init__(self, *, with_children: bool = False) -> None:
        self._context = forking_context()
        self._with_children = with_children
        self._workers: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        """function(rank, init_method, *args) on every rank; the results in order of rank.

        `function` must be importable from a test module, and joins and leaves the group itself.
        """
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(there, list(sys.path)), daemon=not self._with_children
            )
            process.start()
            there.close()
            self._workers.append((process, here))
        with tempfile.TemporaryDirectory() as folder:
            init = f"file://{Path(folder) / 'ranks'}"
            for rank, (_, pipe) in enumerate(self._workers[:world]):
                pipe.send((function.__module__, function.__qualname__, (rank, init, *args)))
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
            results = [None] * world
            while waiting:
                # not by rank: rank 0 may wait forever for one that failed
                answering = wait(list(waiting), TIMEOUT_S)
                if not answering:
                    self.close()
                    raise TimeoutError(
                        f"ranks {[*waiting.values()]} of {function.__qualname__} did not answer"
                    )
                for pipe in answering:
                    rank = waiting.pop(pipe)
                    ok, value = pipe.recv()
                    if not ok:
                        self.close()  # the other ranks may wait for this one forever
                        raise AssertionError(f"rank {rank}:\n{value}")
                    results[rank] = value
        return results

    def close(self) -> None:
        for _, pipe in self._workers:
            pipe.close()  # an idle rank leaves by itself, and takes its own children with it
        for process, _ in self._workers:
            process.join(LEAVE_S if self._with_children else 0)
            process.kill()
            process.join()
        self._workers = []


def _serve(pipe: Any, path: list[str]) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path[:] = path
    import importlib

    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: a collection of the rest takes no time
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            value = getattr(importlib.import_module(module), name)(*args)
            gc.collect()  # else a model keeps its groups, whose threads take a core while idle
            left = len(os.listdir("/proc/self/task"))
            assert left <= MOST_THREADS, f"{left} threads: groups of earlier calls are still here"
            pipe.send((True, value))
            del value
        except Exception:
            pipe.send((False, traceback.format_exc()))
