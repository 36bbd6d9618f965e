"""Runs one function on several parts of a job, each in its own process, and counts their
progress."""

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
    """Calls function(part, advance) for every part, each in its own process, and returns the
    results in order. A single part runs in this process.

    Args:
        function: importable by name; must often call its `advance` with the bytes just completed.
        advance: called here with the progress of all parts.
        where: name of the job, for the error if a process is killed.

    Raises:
        The first error of a part; the other parts are stopped.
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
