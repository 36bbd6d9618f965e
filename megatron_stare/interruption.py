"""Ctrl-C and SIGTERM as one orderly end: an exception where the run stands, and nothing that cuts its closing short.

Comes from the system; goes through whatever the run is at to `cli.py`, which says what there is to continue. Only the
first signal raises. Later ones are announced: a second exception, in the middle of what the first one closes, would
leave processes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import signal
import threading
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Standing:
    """How far a run got."""

    run_dir: Path
    step: int  # the last that was finished; 0: none
    steps: int  # that the run has
    checkpoint: int | None  # the step of the newest complete one
    chosen: bool  # whether the user gave the run's directory


class Interruption:
    """What is known of the signal that ends this run."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal
        self.standing: Standing | None = None  # filled in by the session as it closes, where there was one


_current = Interruption()
_closing = 0  # how many `uninterrupted` are open


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """While open, the first SIGINT or SIGTERM raises KeyboardInterrupt in the main thread, and later ones nothing.

    The same error for both, and none of our own: libraries let it through, and Ray raises it anew while it waits. A
    signal that is ignored (nohup, a shell's `&`) stays ignored. Elsewhere than in the main thread this does nothing.
    """
    global _current
    _current = Interruption()
    mine = threading.current_thread() is threading.main_thread()
    caught = [number for number in SIGNALS if mine and signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, _handle) for number in caught}
    try:
        yield _current
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """While open, signals are announced and raise nothing: for what closes processes down."""
    global _closing
    _closing += 1
    try:
        yield
    finally:
        _closing -= 1


def run_whole(coroutine: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, in a loop that no signal leaves half made or half closed: Python prints a traceback as it forgets
    half a loop."""
    before = _current.number
    with uninterrupted():
        loop = asyncio.new_event_loop()
    try:
        if _current.number != before:  # a signal came meanwhile
            coroutine.close()
            raise KeyboardInterrupt
        return loop.run_until_complete(coroutine)
    finally:
        with uninterrupted():
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


@contextlib.contextmanager
def own_sigterm() -> Iterator[None]:
    """Gives SIGTERM back to the handler of before: Ray puts its own in its place while it starts. A signal that came
    meanwhile, for which Ray ends what it has started and exits, is handed on."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        if not callable(before):
            raise
        before(signal.SIGTERM, None)
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


class ClosingStack(contextlib.ExitStack):
    """An ExitStack that no signal cuts short."""

    def __exit__(self, *exception: object) -> bool:
        with uninterrupted():
            return bool(super().__exit__(*exception))  # type: ignore[arg-type]


def raise_if_received() -> None:
    """Raises KeyboardInterrupt where a signal came and its own was lost, in a destructor for instance."""
    if _current.number is not None:
        raise KeyboardInterrupt


def stopped_at(standing: Standing) -> None:
    """Notes how far the run that is being interrupted got."""
    _current.standing = standing


def what_now(interruption: Interruption, command: Sequence[str], options: Sequence[str]) -> str:
    """Where the run stopped, and how it goes on; two lines.

    Args:
        command: that starts the run, up to its overrides, without run.dir where the run had a directory.
        options: that follow, without --resume where the run had a directory.
    """
    begun = f"interrupted ({signal.Signals(interruption.number or signal.SIGINT).name})"
    standing = interruption.standing
    if standing is None:
        return f"{begun} before the run began; start it with\n  {shlex.join([*command, *options])}"
    begun += f" after step {standing.step} of {standing.steps}"
    if standing.checkpoint is not None:
        again = "; what came after it is done again" if standing.checkpoint < standing.step else ""
        resume = [*command, f"run.dir={standing.run_dir}", *options, "--resume"]
        kept = f"the last checkpoint is of step {standing.checkpoint}{again}"
        return f"{begun}; {kept}; continue with\n  {shlex.join(resume)}"
    fresh = [f"run.dir={_free(standing.run_dir)}"] if standing.chosen else []
    anew = [*command, *fresh, *options]
    return f"{begun}; there is no checkpoint yet, so the run starts anew, with\n  {shlex.join(anew)}"


def _free(run_dir: Path) -> Path:
    """A directory beside this one that does not exist."""
    return next(p for n in itertools.count(2) if not (p := run_dir.with_name(f"{run_dir.name}-{n}")).exists())


def _handle(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    if _current.number is not None:
        _say(f"{name}: already closing; kill -9 {os.getpid()} would leave processes behind")
        return
    _current.number = number
    _say(f"{name}: closing the run, which takes some seconds")
    if not _closing:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())  # print() is not to be called where it may have been interrupted
