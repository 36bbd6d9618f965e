"""Writes a checkpoint while training continues. `BackgroundSave` stages the checkpoint and forks
writer processes, and its method `finish` completes the checkpoint.

Each writer process is forked from its rank, and sees the rank's memory as it was at the fork. The
fork is copy-on-write: the operating system copies a page of memory only when a process changes the
page. Two kinds of data are copied before the fork: data on a GPU, and host memory that the rank and
its writers would share. Writers die with their rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import queue
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException

from megatron_stare.errors import UserError
from megatron_stare.megatron.backend.cpu_backend import backend, substituted
from megatron_stare.weights.files.manifest import SHARD, Sum, SummedFile, sums_of

PR_SET_PDEATHSIG = 1  # of prctl(2)
_WAIT_S = 10
_BEGIN_S, _FORKS = 10.0, 3  # time for a writer to start, and how often it is forked
_libc = ctypes.CDLL(None)  # at import: loading takes a lock, which a fork could inherit locked


class BackgroundSave:
    """Saves this rank's part of a checkpoint in the background. Start the next save only after this
    save is finished or dropped.

    Args:
        request: Megatron's plan of the save. BackgroundSave runs the plan itself, because
            Megatron's own ways to run a plan have drawbacks. They either import torch again for
            every save, or leave writer processes behind when a rank is killed.
        folder: folder of the checkpoint.
    """

    def __init__(self, request: AsyncRequest, folder: str) -> None:
        self._request, self._folder = request, folder
        self._writers: list[tuple[Any, Connection]] = []
        if request.async_fn is None:
            return  # this rank has nothing to write
        with backend():
            self._staged = request.preload_fn() if request.preload_fn else request.async_fn_args[1]
        for number, bucket in enumerate(self._staged):
            self._writers.append(self._begun(request.async_fn.args[0], number, bucket))

    def _begun(self, transforms: Sequence[Any], number: int, bucket: Any) -> tuple[Any, Connection]:
        """Returns a writer process that has started, and the pipe for the writer's result.

        A forked writer inherits the locks of this process, but not the threads that hold the locks.
        If another thread held a lock at the fork and the writer needs this lock, the writer waits
        forever and does not start. A writer that does not start in time is killed, and another
        writer is forked.

        Raises:
            UserError: no writer started.
        """
        context = mp.get_context("fork")
        for _ in range(_FORKS):
            here, there = context.Pipe(duplex=False)
            writer = context.Process(
                target=_write, args=(there, os.getpid(), transforms, number, bucket), daemon=False
            )
            writer.start()
            there.close()  # so that the death of a writer is noticed
            if here.poll(_BEGIN_S):
                with contextlib.suppress(EOFError):  # it was killed, which `_result` reports
                    here.recv()
                return writer, here
            writer.kill()
            writer.join()
            here.close()
        self.drop()
        raise UserError(
            "the checkpoint could not be written (its writer processes do not start)",
            where=self._folder,
        )

    def written(self) -> bool:
        """Returns True if every writer of this rank has finished or failed. Does not wait."""
        return all(pipe.poll() for _, pipe in self._writers)

    def wait(self) -> None:
        """Waits until `written` is True."""
        for _, pipe in self._writers:
            pipe.poll(None)

    def finish(self) -> dict[str, Sum]:
        """Waits until this rank's part of the checkpoint is written, then completes the checkpoint
        together with all other ranks. All ranks must call `finish`.

        Returns:
            Lengths and checksums of the files that this rank wrote, by name.

        Raises:
            UserError: the checkpoint could not be written.
        """
        results: dict[int, Any] = {}
        sums: dict[str, Sum] = {}
        for number, (_, pipe) in enumerate(self._writers):
            results[number], written = self._result(pipe)
            sums |= written
        self._end()
        if results:
            self._request.async_fn_args[2].put(results)  # where Megatron's own writers put them
        with backend():
            try:
                for complete in self._request.finalize_fns:
                    complete()
            except CheckpointException as error:  # of another rank, which reports the reason
                raise UserError(
                    "the checkpoint could not be written", where=self._folder
                ) from error
        return sums | self._of_the_first_rank()

    def _of_the_first_rank(self) -> dict[str, Sum]:
        """Returns the lengths and checksums of the files that only rank 0 writes. The files that
        only rank 0 writes contain the metadata and the non-tensor state."""
        if torch.distributed.get_rank() != 0:
            return {}
        folder = Path(self._folder)
        return sums_of(
            folder,
            (file.name for file in folder.iterdir() if file.is_file() and file.suffix != SHARD),
        )

    def drop(self) -> None:
        """Kills the writers."""
        for writer, _ in self._writers:
            writer.kill()
        self._end()

    def _result(self, pipe: Connection) -> Any:
        try:
            result = pipe.recv()
        except EOFError:
            result = RuntimeError("its writer was killed")
        if isinstance(result, Exception):
            self.drop()
            reason = getattr(result, "strerror", None) or result
            raise UserError(
                f"the checkpoint could not be written ({reason})", where=self._folder
            ) from result
        return result

    def _end(self) -> None:
        for writer, pipe in self._writers:
            writer.join(_WAIT_S)
            pipe.close()
        self._writers = []


def _write(
    pipe: Connection, parent: int, transforms: Sequence[Any], number: int, bucket: Any
) -> None:
    gc.disable()  # collection would free the parent's CUDA tensors
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # sent to the whole terminal; the parent decides
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent was killed before prctl
    pipe.send(None)  # reports that it has started
    results: queue.SimpleQueue = queue.SimpleQueue()
    counted: queue.Queue = queue.Queue()
    counted.put(number)
    files: list[SummedFile] = []

    def opened(path: str, mode: str) -> SummedFile:
        assert mode == "wb"
        files.append(SummedFile(path))
        return files[-1]

    # `open` is a built-in, so the module itself does not define it
    with substituted(filesystem_async, "open", opened, absent=True):
        FileSystemWriterAsync.write_preloaded_data(
            list(transforms), number, bucket, results, counted, use_fsync=True
        )
    result = results.get()[1]
    sums = {os.path.basename(os.fspath(file.name)): file.sum() for file in files}
    # On a full disk torch's writer reports an unexpected position: send the file's own error
    # instead.
    if isinstance(result, Exception):
        pipe.send(next((file.failure for file in files if file.failure is not None), result))
    else:
        pipe.send((result, sums))
    os._exit(0)  # without the parent's exit handlers
