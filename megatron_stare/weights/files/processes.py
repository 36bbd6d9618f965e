"""Runs one function on several parts of a job and counts the progress. If there are several parts,
each part runs in its own process."""

from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from megatron_stare.errors import UserError

Part = TypeVar("Part")
Result = TypeVar("Result")
Advance = Callable[[int], None]  # receives the bytes (or other units of the job) just completed
_POLL_S = 0.2


def run_parts(
    function: Callable[[Part, Advance], Result],
    parts: Sequence[Part],
    advance: Advance,
    where: str = "convert",
) -> list[Result]:
    """Calls function(part, advance) for every part and returns the results in the order of the
    parts. If there are several parts, each part runs in its own process. If there is only one part,
    the part runs in the caller's process.

    Args:
        function: function that can be imported by name. The function must call its argument
            `advance` often, with the number of bytes completed since the last call.
        advance: called in the caller's process with the number of bytes that all parts together
            completed since the last call.
        where: name of the job, for the error if a process is killed.

    Raises:
        The first error of a part. The other parts are then stopped.
    """
    if len(parts) == 1:
        return [function(parts[0], advance)]
    context = mp.get_context("fork")  # children need not import modules again
    counter = context.Value("q", 0)
    results: dict[int, Result] = {}
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    seen = 0
    try:
        for number, part in enumerate(parts):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(there, counter, os.getpid(), function, part), daemon=True
            )
            process.start()
            there.close()  # so that the pipe ends if the process dies
            processes.append(process)
            pipes[here] = number
        while pipes:
            ready = wait(list(pipes), timeout=_POLL_S)
            for pipe in [pipe for pipe in pipes if pipe in ready]:
                results[pipes.pop(pipe)] = _answer(pipe, where)
            done = counter.value
            advance(done - seen)
            seen = done
    finally:
        for started in processes:
            started.kill()
            started.join()
    return [results[number] for number in range(len(parts))]


def _answer(pipe: Connection, where: str) -> Any:
    try:
        good, value = pipe.recv()
    except EOFError as error:
        raise UserError(
            "a process was killed", where=where, fix="if memory ran out, use fewer --processes"
        ) from error
    if not good:
        raise value
    return value


def _serve(
    pipe: Connection, counter: Any, parent: int, function: Callable[[Any, Advance], Any], part: Any
) -> None:
    torch.set_num_threads(1)

    def advance(nbytes: int) -> None:
        if os.getppid() != parent:  # the parent was killed, so nobody waits for the result
            os._exit(1)
        with counter.get_lock():
            counter.value += nbytes

    try:
        answer = True, function(part, advance)
    except Exception as error:  # run_parts raises it again
        answer = False, error
    pipe.send(answer)
