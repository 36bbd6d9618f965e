"""Signals as an orderly end: an exception where the run stands, and nothing that cuts its closing short.

Comes from the system; goes through whatever the run is at to `cli.py`, which says what there is to continue. Ctrl-C
raises at once. Once a run makes steps, SIGTERM and SIGUSR1 are to leave a checkpoint, so they raise where the state is
that of a whole step: SIGTERM while responses are sampled, or else after the update under way, for which there is a
limit; SIGUSR1 after the step. What the main thread runs in an event loop is cancelled first. Only one signal raises.
Later ones are announced: a second exception, in the middle of what the first one closes, would leave processes behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AFTER_STEP = signal.SIGUSR1
AGAIN_S = 0.01  # after which what a destructor has swallowed is raised anew
LOOP_S = 5.0  # in which an event loop that is told to end has its coroutines closed; one of them may block it
TO_BE_CONTINUED = 75  # exit code of a run that was told to end, or was out of time, and is to be resumed; EX_TEMPFAIL


@dataclass(frozen=True)
class Standing:
    """How far a run got."""

    run_dir: Path
    step: int  # the last that was finished; 0: none
    steps: int  # that the run has
    checkpoint: int | None  # the step of the newest complete one


class Interruption:
    """What is known of the signal that ends this run."""

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that counts
        self.time_is_up = False  # the run ended by itself because of --stop-after
        self.standing: Standing | None = None  # filled in by the session as it closes, where there was one
        self.grace_s: float | None = None  # of a run that makes steps; None: every signal raises at once
        self.open_to: set[int] = set()  # signals that raise where the run is now, though it makes steps
        self.deadline: float | None = None  # by time.monotonic, of what is done before closing
        self.raised = False  # or is owed, where nothing may be raised
        self.swallowed = False  # by a destructor, as it was raised there
        self.gave_up = False  # the update under way did not end in time
        self.end_loop: Callable[[], None] | None = None  # of the main thread; None: it runs no event loop

    @property
    def exit_code(self) -> int:
        """Of a run that this ended."""
        if self.time_is_up or (self.number == AFTER_STEP and self.standing is not None and not self.gave_up):
            return TO_BE_CONTINUED
        return 128 + (self.number or signal.SIGINT)


_current = Interruption()
_closing = 0  # how many `uninterrupted` are open


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """While open, the first SIGINT, SIGTERM or SIGUSR1 raises KeyboardInterrupt in the main thread, at once or, once
    `makes_steps` was called, where it may; and later ones nothing.

    The same error for all, and none of our own: libraries let it through, and Ray raises it anew while it waits. A
    signal that is ignored (nohup, a shell's `&`) stays ignored. Elsewhere than in the main thread this does nothing.
    """
    global _current
    _current = Interruption()
    mine = threading.current_thread() is threading.main_thread()
    caught = [number for number in SIGNALS if mine and signal.getsignal(number) not in (signal.SIG_IGN, None)]
    handlers = dict.fromkeys(caught, _handle) | ({signal.SIGALRM: _late} if mine else {})
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    said = sys.unraisablehook
    if mine:
        sys.unraisablehook = lambda lost: _swallow() if _is_ours(lost.exc_type) else said(lost)
    try:
        yield _current
    finally:
        if mine:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = said
        for number, handler in before.items():
            signal.signal(number, handler)


def makes_steps(grace_s: float | None) -> None:
    """From here on SIGTERM and SIGUSR1 raise where the state is that of a whole step.

    Args:
        grace_s: from SIGTERM on, seconds until it raises wherever the run is; None: all signals raise at once again.
    """
    _current.grace_s = grace_s


@contextlib.contextmanager
def open_to(*numbers: int) -> Iterator[None]:
    """While open, these signals raise though steps are made; also where one came before, and has not."""
    _current.open_to = set(numbers)
    try:
        if _current.number in _current.open_to and not _current.raised:
            _raise()
        yield
    finally:
        _current.open_to = set()


def is_asked_to_end() -> bool:
    """Whether a signal came: what would only serve another step need not be done."""
    return _current.number is not None


def is_to_be_saved() -> bool:
    """Whether the run, which is being closed, was interrupted where its state is that of a whole step, by what asks
    for a checkpoint."""
    asked = _current.time_is_up or _current.number in (signal.SIGTERM, AFTER_STEP)
    return asked and _current.grace_s is not None and not _current.gave_up


def seconds_left() -> float | None:
    """For what is still done before closing; None: there is no limit."""
    return None if _current.deadline is None else max(_current.deadline - time.monotonic(), 0.1)


def end_for_time() -> None:
    """Raises KeyboardInterrupt: the run has no time for another step."""
    _current.time_is_up = True
    raise KeyboardInterrupt


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """While open, signals are announced and raise nothing: for what closes processes down."""
    global _closing
    _closing += 1
    try:
        yield
    finally:
        _closing -= 1


def run_whole(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """As asyncio.run of the coroutine that is made. Interrupted as `run_on` is, but leaves nothing under way."""
    with _raises_after() as raises:
        loop = asyncio.new_event_loop()
        try:
            return _run(loop, make, raises)
        finally:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


def run_on(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of the coroutine that is made, in a loop that stays.

    A signal that raises cancels the coroutine, and raises when that has ended. Raised in the middle of a loop, it would
    leave coroutines that nobody awaits and half a loop, of which Python tells the user when it forgets them. What has
    not ended after LOOP_S is left as it is.
    """
    with _raises_after() as raises:
        return _run(loop, make, raises)


def start_on(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
    """What the coroutine that is made will end with, in a loop that another thread runs; no signal comes between the
    two, and none ends it."""
    with _raises_after():
        return asyncio.run_coroutine_threadsafe(make(), loop)


def _run(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]], raises: bool) -> T:
    """See `run_on`.

    Args:
        raises: whether a signal ends the coroutine; not in another thread, nor where processes are being closed.
    """
    if not raises:
        return loop.run_until_complete(make())
    task = loop.create_task(make())
    _current.end_loop = lambda: _end_within(loop, task)
    try:
        if _current.raised:
            _current.end_loop()
        return loop.run_until_complete(task)
    finally:
        _current.end_loop = None
        if _current.raised:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _end_within(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, LOOP_S)  # in the place of `grace_s`, which has ended as this is raised
    loop.call_soon_threadsafe(task.cancel)


@contextlib.contextmanager
def _raises_after() -> Iterator[bool]:
    """While open, a signal raises nothing, and does so after it. Whether it would have raised here at all."""
    if threading.current_thread() is not threading.main_thread() or _closing or _current.raised:
        yield False
        return
    try:
        with uninterrupted():
            yield True
    finally:
        if _current.raised:
            raise KeyboardInterrupt


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
        _current.raised, _current.swallowed = True, False
        raise KeyboardInterrupt


def stopped_at(standing: Standing) -> None:
    """Notes how far the run that is being interrupted got."""
    _current.standing = standing


def what_now(
    interruption: Interruption, command: Sequence[str], options: Sequence[str], ended: str | None = None
) -> str:
    """Where the run stopped, and how it goes on; two lines.

    Args:
        ended: how, in a word or two; None: by the signal, or by --stop-after.
        command: that starts the run, up to its overrides, without run.dir where the run had a directory.
        options: that follow, without --resume where the run had a directory.
    """
    begun = ended or f"interrupted ({signal.Signals(interruption.number or signal.SIGINT).name})"
    if interruption.time_is_up:
        begun = "stopped, as --stop-after asks,"
    standing = interruption.standing
    if standing is None:
        return f"{begun} before the run began; start it with\n  {shlex.join([*command, *options])}"
    begun += f" after step {standing.step} of {standing.steps}"
    if standing.checkpoint is None:
        kept = "there is no checkpoint yet, so it begins again"
    else:
        again = "; what came after it is done again" if standing.checkpoint < standing.step else ""
        kept = f"the last checkpoint is of step {standing.checkpoint}{again}"
    resume = [*command, f"run.dir={standing.run_dir}", *options, "--resume"]
    return f"{begun}; {kept}; continue with\n  {shlex.join(resume)}"


def _handle(number: int, frame: FrameType | None) -> None:
    name, before = signal.Signals(number).name, _current.number
    # whoever waits for a step to end may be in a hurry after all
    hurries = before == AFTER_STEP and number != AFTER_STEP and not _current.raised
    if before is not None and not hurries:
        _say(f"{name}: already closing; kill -9 {os.getpid()} would leave processes behind")
        return
    _current.number = number
    if number == signal.SIGTERM and _current.grace_s is not None:
        _current.deadline = time.monotonic() + _current.grace_s
        signal.setitimer(signal.ITIMER_REAL, _current.grace_s)
    if number == signal.SIGINT or _current.grace_s is None or number in _current.open_to:
        _say(f"{name}: closing the run, which takes some seconds")
        _raise()
    else:
        what = "step" if number == AFTER_STEP else "update"
        _say(f"{name}: the run is saved and closed after the {what} under way")


def _late(number: int, frame: FrameType | None) -> None:
    """What SIGTERM let go on, or an event loop that is to end, has taken too long."""
    if _current.number is None:
        return
    if _current.swallowed:
        _raise_anew()
    elif not _current.raised:
        _current.gave_up = True
        _say(f"{_current.grace_s:g} s are over: closing the run without a checkpoint")
        _raise()
    elif _current.end_loop is not None:
        raise KeyboardInterrupt


def _is_ours(error: type[BaseException]) -> bool:
    return issubclass(error, KeyboardInterrupt) and _current.number is not None


def _swallow() -> None:
    """A destructor, whose errors Python can only print, was where a signal raised."""
    _current.raised, _current.swallowed = False, True
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def _raise_anew() -> None:
    """As the signal did that was swallowed, if the run is still where it may."""
    number, limit_s = _current.number, _current.grace_s
    _current.swallowed = False
    if number == signal.SIGINT or limit_s is None or number in _current.open_to or _current.gave_up:
        _raise()
    else:
        signal.setitimer(signal.ITIMER_REAL, seconds_left() or 0)


def _raise() -> None:
    _current.raised, _current.swallowed = True, False
    if _current.end_loop is not None:
        _current.end_loop()
    elif not _closing:
        raise KeyboardInterrupt


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())  # print() is not to be called where it may have been interrupted
