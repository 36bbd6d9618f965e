"""Ends a command in an orderly way after a signal. The main thread receives the signal, and the
driver's thread stops when it next polls for signals.

The function `on_driver_thread` starts a new thread, the driver's thread, and runs a command on this
new thread. When a signal arrives, the main thread records the signal, but does not raise an
exception. The driver's thread raises KeyboardInterrupt at its next `poll`. No exception is raised
between polls. KeyboardInterrupt is therefore never raised while Ray starts, and never inside
library code that holds a lock. KeyboardInterrupt is also never raised inside a destructor, where
Python would ignore the exception. Signals do not interrupt the shutdown of processes.

If a run that makes training steps receives SIGINT, SIGTERM or SIGHUP, the run ends after the
current update. Before the run closes, the run can save a checkpoint of its last complete step. A
SIGINT, SIGTERM or SIGHUP that arrives while responses are sampled ends the run immediately. SIGUSR1
ends the run after the current step. After SIGINT, SIGTERM or SIGHUP, the run has `grace_s` seconds
to end. If the run has not ended after `grace_s` seconds, the run ends at its next poll, even within
a step. `makes_steps` sets `grace_s`. A second Ctrl-C immediately ends the process and its child
processes, without saving.

A closed terminal sends SIGHUP to all processes of its foreground job. The driver's thread blocks
SIGHUP. Processes that the driver's thread starts also block SIGHUP, because they inherit the signal
mask of the thread. To save a checkpoint, the run can therefore still use its processes after the
terminal was closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import select
import shlex
import shutil
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AFTER_STEP = signal.SIGUSR1
SIGNALS = (*ENDING, AFTER_STEP)
DRIVER = "driver"  # name of the thread that runs the command
GUARD_S = 0.02  # between restorations of the handlers while Ray starts
TICK_S = 0.2  # between checks for a signal in waits that a signal cannot wake
# seconds after a signal until the driver's thread must poll; Slurm kills 30 s after SIGTERM
UNHEARD_S = 20.0
# A second SIGINT within this time counts as the first: a launcher may forward a signal that its
# process group also received.
SAME_S = 0.5
KILLED_S = 1.0  # for killed processes to disappear
# Exit code of a run that was told to end, or ran out of time, and can be resumed: EX_TEMPFAIL
TO_BE_CONTINUED = 75
# modules whose processes clean up and exit by themselves when their parent ends
LEAVE_BY_THEMSELVES = (
    "megatron_stare.hangs.watcher",
    "megatron_stare.rollout.engines.sglang.serve",
)


@dataclass(frozen=True)
class Standing:
    """Progress of a run."""

    run_dir: Path
    step: int  # the last finished step; 0: none
    steps: int  # number of the run's steps
    checkpoint: int | None  # step of the newest complete checkpoint
    # --from-step of a start that has not loaded this checkpoint; the newest one is another
    from_step: int | None = None


class Interruption:
    """State of a command that a signal can end. The state includes the received signal, if any, and
    determines at which points the command may end.

    Fields without an underscore may be read from any thread. The lock protects the fields that the
    main thread and the driver's thread both change.
    """

    def __init__(self, driver: threading.Thread | None = None, hurries: bool = True) -> None:
        self.number: int | None = None  # of the signal that applies
        self.time_is_up = False  # the run ended by itself because of --stop-after
        self.standing: Standing | None = None  # set when the run closes; None if there was no run
        self.grace_s: float | None = None  # set while the run makes steps; None: all signals raise
        self.deadline: float | None = None  # end of the work before closing, time.monotonic
        self.raised = False
        self.gave_up = False  # the current update did not end in time
        self._driver = driver  # the thread that polls; None: no signals are handled
        self._hurries = hurries  # see on_driver_thread
        self._lock = threading.Lock()
        self._open_to: set[int] = set()  # signals that may raise now although steps are made
        self._closing = 0  # number of open `uninterrupted` contexts
        # deadline (time.monotonic) by which the driver's thread must poll
        self._heard_by: float | None = None
        # stops the event loop of the driver's thread; None: there is no loop
        self._cancel: Callable[[], None] | None = None
        self.stands: Callable[[], Standing | None] = lambda: None  # called by a sudden end
        self.folders: list[Path] = []  # removed by a sudden end
        self._taken_at = 0.0
        self._guarding = False  # handlers are restored repeatedly
        self._put_back = threading.Event()  # set once handlers are restored after the guard
        self.wake: Callable[[], None] = lambda: None  # wakes the main thread

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was ended by a signal or by --stop-after."""
        if self.time_is_up or (
            self.number == AFTER_STEP and self.standing is not None and not self.gave_up
        ):
            return TO_BE_CONTINUED
        return 128 + (self.number or signal.SIGINT)

    # methods for the main thread

    def take(self, number: int) -> bool:
        """Records a signal. Returns True if the process must end at once."""
        name = signal.Signals(number).name
        with self._lock:
            # cancels the alarm of Ray's core, which would abort three seconds after a signal
            signal.alarm(0)
            now, before = time.monotonic(), self.number
            # a user who waits for the step to end may become impatient
            hurries = before == AFTER_STEP and number != AFTER_STEP and not self.raised
            if before is not None and not hurries:
                if number == signal.SIGINT and now > self._taken_at + SAME_S:
                    _say(f"{name}: ending at once, without saving")
                    return True
                _say(
                    f"{name}: already closing; Ctrl-C, or kill -INT {os.getpid()}, ends at once,"
                    " without saving"
                )
                return False
            self.number, self._taken_at, self._heard_by = number, now, None
            if self.grace_s is not None and number != AFTER_STEP:
                self.deadline = now + self.grace_s
            if self.grace_s is None or number in self._open_to:
                _say(f"{name}: closing the run, which takes some seconds")
            else:
                what = "step" if number == AFTER_STEP else "update"
                _say(f"{name}: the run is saved and closed after the {what} under way")
            self._look()
            return False

    def look(self) -> float | None:
        """Checks whether the command can now end because of a received signal, and whether the
        run's grace time is over. Returns the number of seconds that the main thread may wait before
        the next call of `look`. Returns None if the main thread may wait until the next signal
        arrives.

        Raises:
            TimeoutError: the driver's thread did not poll in time.
        """
        with self._lock:
            if self._guarding:
                return GUARD_S
            if self.number is None or self.raised:
                return None
            now = time.monotonic()
            late = self.deadline is not None and now >= self.deadline and self.grace_s is not None
            if late and not self.gave_up and not self._may_raise():
                self.gave_up = True
                _say(f"{self.grace_s:g} s are over: closing the run without a checkpoint")
            self._look()
            if self._heard_by is not None and now >= self._heard_by:
                if self._hurries or self.number != signal.SIGINT:
                    raise TimeoutError
                self._heard_by = math.inf
                _say(
                    "waiting for code that cannot be interrupted; a second interrupt ends the"
                    " process, without saving"
                )
            return TICK_S

    def _look(self) -> None:
        """Checks whether the recorded signal may now interrupt the command. If the signal may now
        interrupt the command, `_look` does two things. First, `_look` sets a time limit for the
        next poll of the driver's thread. Second, `_look` cancels the asyncio task that the driver's
        thread is running, if there is one."""
        if not self._may_raise():
            self._heard_by = None
            return
        if self._heard_by is None:
            # code that is open to the signal may run without polling for as long as an update
            self._heard_by = (
                max(time.monotonic(), 0.0 if self.gave_up else self.deadline or 0.0) + UNHEARD_S
            )
            if self._cancel is not None:
                self._cancel()

    def _may_raise(self) -> bool:
        if self.number is None or self.raised or self._closing:
            return False
        return self.grace_s is None or self.number in self._open_to or self.gave_up

    def last_words(self) -> Standing | None:
        """Returns how far the run got, or None if the run's progress cannot be determined now."""
        with contextlib.suppress(Exception):
            return self.standing or self.stands()
        return None

    # methods for the driver's thread

    @property
    def drives(self) -> bool:
        """True if the calling thread is the driver's thread. KeyboardInterrupt is raised only on
        the driver's thread."""
        return self._driver is threading.current_thread()

    def poll(self) -> None:
        """See the function `poll`."""
        if self.number is None or not self.drives:
            return
        with self._lock:
            if not self._may_raise() or self._cancel is not None:
                return
            self.raised = True
        raise KeyboardInterrupt

    def guard(self, on: bool) -> None:
        """Makes the main thread restore the signal handlers of this process. `guard(True)` begins a
        period in which the main thread restores the handlers again and again. `guard(False)` ends
        this period. The main thread then restores the handlers once more. Each call of `guard`
        waits until the main thread has restored the handlers at least once. The wait ends after at
        most UNHEARD_S seconds, even if the main thread has not restored the handlers."""
        self._put_back.clear()
        self._guarding = on
        self.wake()
        self._put_back.wait(UNHEARD_S)

    def put_back(self, handlers: Mapping[int, Any]) -> None:
        """Installs `handlers` as the signal handlers. Only the main thread may call `put_back`."""
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self._put_back.set()

    def open_to(self, numbers: Sequence[int]) -> None:
        """Sets the signals for which `poll` raises KeyboardInterrupt even while the run makes
        training steps."""
        with self._lock:
            self._open_to = set(numbers)

    def closing(self, by: int) -> None:
        """Updates the number of open `uninterrupted` contexts. The argument `by` is 1 when such a
        context opens, and -1 when such a context closes."""
        with self._lock:
            self._closing += by

    @contextlib.contextmanager
    def cancelling(
        self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]
    ) -> Iterator[None]:
        """Context in which a signal cancels `task`. The cancellation is delayed while the run must
        not be interrupted (see `makes_steps` and `uninterrupted`). If a signal has cancelled
        `task`, KeyboardInterrupt is raised after `task` has ended."""
        told = False

        def cancel() -> None:
            nonlocal told
            told = True
            loop.call_soon_threadsafe(task.cancel)

        with self._lock:
            self._cancel, self._heard_by = cancel, None
            self._look()
        try:
            yield
        finally:
            with self._lock:
                self._cancel = None
                self.raised |= told
            if told:
                raise KeyboardInterrupt


_current = Interruption()


def on_driver_thread(
    body: Callable[[Interruption], int],
    last_words: Callable[[Interruption], str],
    hurries: bool = True,
) -> int:
    """Runs a command on a new thread, the driver's thread. Meanwhile, the main thread handles
    the signals in SIGNALS.

    If the process already ignores a signal, for example because of nohup or a shell's `&`, the
    process continues to ignore this signal. If the caller is not the main thread, the command runs
    on the caller's thread and no signal is handled.

    Args:
        body: the command, a function that returns the exit code. A signal raises KeyboardInterrupt
            at one of the command's polls.
        last_words: returns the message to print if the process ends at once. The process ends at
            once after a second Ctrl-C, or if the driver's thread does not poll.
        hurries: True: the process ends at once if the driver's thread does not poll in time after
            a signal. False: after a single SIGINT it waits instead, because the process has other
            work of the user's, such as the variables of a notebook.

    Raises:
        BaseException: the exception that the command raised.
    """
    global _current
    if threading.current_thread() is not threading.main_thread():
        _current = Interruption()
        return body(_current)
    done: Future[int] = Future()
    context = contextvars.copy_context()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # also of what it starts
        try:
            done.set_result(context.run(body, interruption))
        except BaseException as error:
            done.set_exception(error)
        finally:
            _written(wake)

    thread = threading.Thread(target=run, name=DRIVER)
    _current = interruption = Interruption(thread, hurries)
    came: deque[int] = deque()
    caught = [
        number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)
    ]

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in caught}
    terminals = [stream for stream in (0, 1, 2) if os.isatty(stream)]
    interruption.wake = lambda: _written(wake)
    waker = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poller = select.poll()  # select.select refuses descriptors from 1024 on
    poller.register(woken, select.POLLIN)
    try:
        thread.start()
        while not done.done():
            try:
                interruption.put_back(dict.fromkeys(caught, note))
                wait_s = interruption.look()
                poller.poll(None if wait_s is None else wait_s * 1_000)
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                at_once = False
                _leave_closed(terminals)
                while came:
                    at_once |= interruption.take(came.popleft())
            except TimeoutError:
                _say("the run did not close in time: ending at once, without saving")
                at_once = True
            if at_once and not done.done():
                _end_at_once(interruption, last_words)
        return done.result()
    finally:
        signal.set_wakeup_fd(waker)
        for number, handler in before.items():
            signal.signal(number, handler)
        if thread.is_alive():  # even after an error here, no command runs on unattended
            thread.join()
        os.close(woken)
        os.close(wake)
        _current = Interruption()


def _leave_closed(terminals: Sequence[int]) -> None:
    """Redirects a standard stream to /dev/null if the stream's terminal was closed. Without the
    redirection, a write to the closed terminal would fail."""
    for stream in terminals:
        if not os.isatty(stream):
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, stream)
            os.close(null)


def _written(pipe: int) -> None:
    with contextlib.suppress(BlockingIOError):  # a full pipe wakes the reader anyway
        os.write(pipe, b"\0")


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Keeps this process's signal handlers while Ray starts, by restoring them again and again.
    Ray's core installs its own SIGTERM handler, which prints every thread's stack. If Ray starts on
    the main thread, Ray installs another SIGTERM handler."""
    if _current.drives:
        _current.guard(True)
        try:
            yield
        finally:
            _current.guard(False)
        return
    mine = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if mine else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end_at_once(interruption: Interruption, last_words: Callable[[Interruption], str]) -> None:
    """Immediately kills all child processes and ends this process, without saving anything."""
    interruption.gave_up = True
    started = _below(psutil.Process())
    for process in started:  # top down: Ray's agent restarts a worker that has ended
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(started, timeout=KILLED_S)
    for folder in interruption.folders:
        shutil.rmtree(folder, ignore_errors=True)
    # last, because the driver's thread continues until os._exit
    interruption.standing = interruption.last_words()
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\n")  # shows the cursor, which the live panel hides
    with contextlib.suppress(Exception):
        _say(last_words(interruption))
    os._exit(128 + (interruption.number or signal.SIGINT))


def _below(process: psutil.Process) -> list[psutil.Process]:
    """Returns the descendants of a process, parents before children. A descendant that exits by
    itself when its parent ends is left out. The descendants of a left-out process are also left
    out."""
    found, ahead = [], deque([process])
    while ahead:
        with contextlib.suppress(psutil.Error):
            for child in ahead.popleft().children():
                with contextlib.suppress(psutil.Error):
                    if not any(module in child.cmdline() for module in LEAVE_BY_THEMSELVES):
                        found.append(child)
                        ahead.append(child)
    return found


def poll() -> None:
    """Raises KeyboardInterrupt if a signal was received and the command may be interrupted at this
    point.

    If no signal was received, `poll` costs almost nothing. On threads other than the driver's
    thread, `poll` does nothing.
    """
    _current.poll()


def raise_if_received() -> None:
    """Raises KeyboardInterrupt if any signal was received. Unlike `poll`, `raise_if_received` does
    not check whether the command may be interrupted at this point."""
    if _current.number is not None and _current.drives:
        _current.raised = True
        raise KeyboardInterrupt


def pause(seconds: float) -> None:
    """Sleeps, and polls for signals while sleeping."""
    until = time.monotonic() + seconds
    poll()
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, TICK_S))
        poll()


def wait_for(future: Future[T], meanwhile: Callable[[], object] = lambda: None) -> T:
    """Returns the future's result, or raises the future's error. Until the future is done, a loop
    polls for signals and calls the function `meanwhile`."""
    poll()
    meanwhile()
    while not wait([future], timeout=TICK_S).done:
        poll()
        meanwhile()
    return future.result()


def makes_steps(grace_s: float | None) -> None:
    """Declares the beginning or the end of the time in which the run makes training steps. The
    session calls `makes_steps` with a number before the first step, and with None after the last
    step. While the run makes training steps, a received signal makes `poll` raise KeyboardInterrupt
    in only two cases. In the first case, `poll` is called inside an `open_to` context to which the
    received signal was passed. In the second case, the received signal is SIGINT, SIGTERM or
    SIGHUP, and more than `grace_s` seconds have passed since the signal arrived. Between two steps,
    the session calls `raise_if_received`, which raises KeyboardInterrupt for every received signal.

    Args:
        grace_s: time that the run has after SIGINT, SIGTERM or SIGHUP to end by itself, in seconds.
            When this time is over, the run ends at its next poll. None: the run makes no training
            steps, and every signal raises KeyboardInterrupt at the next poll.
    """
    _current.grace_s = grace_s


@contextlib.contextmanager
def open_to(*numbers: int) -> Iterator[None]:
    """Context in which `poll` raises KeyboardInterrupt for the signals in `numbers`, even while the
    run makes training steps. If a signal in `numbers` has already arrived, KeyboardInterrupt is
    raised on entry to the context."""
    _current.open_to(numbers)
    try:
        poll()
        yield
    finally:
        _current.open_to(())


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Prevents signals from interrupting the code inside this context, such as code that shuts
    processes down. If a signal arrives inside this context, the process prints a message, but no
    exception is raised before the context ends."""
    _current.closing(1)
    try:
        yield
    finally:
        _current.closing(-1)


def is_asked_to_end() -> bool:
    """Returns True if a signal was received. If `is_asked_to_end` returns True, the caller can skip
    work that only a further step needs."""
    return _current.number is not None


def is_to_be_saved() -> bool:
    """Returns True if two conditions both hold: a signal or --stop-after ends the run, and the run
    can still save a checkpoint of its last complete step. Returns False if the run makes no
    training steps."""
    asked = _current.time_is_up or _current.number is not None
    return asked and _current.grace_s is not None and not _current.gave_up


def seconds_left() -> float | None:
    """Returns the number of seconds that remain before the run must close, or None if there is no
    limit."""
    return None if _current.deadline is None else max(_current.deadline - time.monotonic(), 0.1)


def end_for_time() -> None:
    """Ends the run by raising KeyboardInterrupt. The driver calls `end_for_time` if --stop-after
    leaves no time for another step."""
    _current.time_is_up = True
    raise KeyboardInterrupt


def stopped_at(standing: Standing) -> None:
    """Records how far the interrupted run got."""
    _current.standing = standing


def stands_at(ask: Callable[[], Standing | None]) -> None:
    """Stores `ask`, a function that returns how far the run got. The main thread calls `ask` before
    an immediate end of the process, for example after a second Ctrl-C."""
    _current.stands = ask


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """Creates a temporary folder. The temporary folder is removed even if a second Ctrl-C ends the
    process immediately."""
    with tempfile.TemporaryDirectory() as name:
        _current.folders.append(Path(name))
        yield Path(name)


class ClosingStack(contextlib.ExitStack):
    """An ExitStack whose exit is not interrupted by signals."""

    def __exit__(self, *exception: object) -> bool:
        with uninterrupted():
            return bool(super().__exit__(*exception))  # type: ignore[arg-type]


def run_whole(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine to completion in the thread's event loop, and then cancels all unfinished
    tasks of this event loop. Signals have the same effect as in `run_on`.

    All calls of `run_whole` on one thread use the same event loop, whereas each call of asyncio.run
    makes a new event loop. Some Python objects, such as a semaphore or an HTTP client, work in only
    one event loop. Because the event loop stays the same, a user's environment can use such an
    object in several steps.
    """
    loop = _of_thread.kept.loop
    try:
        return run_on(loop, make)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


class _KeptLoop:
    """Holds the event loop of one thread. Python deletes this object after the thread has ended,
    and `__del__` then closes the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        self.loop.close()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.kept = _KeptLoop()


_of_thread = _OfThread()


def run_on(loop: asyncio.AbstractEventLoop, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs a coroutine in an existing loop and returns its result.

    A signal cancels the coroutine. The cancellation is delayed while the run must not be
    interrupted (see `makes_steps` and `uninterrupted`). KeyboardInterrupt is raised after the
    cancelled coroutine has ended. On threads other than the driver's thread, signals have no effect
    on the coroutine.
    """
    if not _current.drives:
        return loop.run_until_complete(make())
    poll()
    task = loop.create_task(make())
    with _current.cancelling(loop, task):
        return loop.run_until_complete(task)


def what_now(
    interruption: Interruption,
    command: Sequence[str],
    options: Sequence[str],
    ended: str | None = None,
) -> str:
    """Returns a message of two lines for the user. The first line states after which step the run
    stopped. The second line is the command that continues the run.

    Args:
        ended: how the run ended, in a few words. None: the signal or --stop-after ended the run.
        command: command that starts the run, with its overrides. If the run had a directory, the
            overrides must not contain run.dir.
        options: options of the command, which are placed after the overrides. If the run had a
            directory, the options must contain neither --resume nor --from-step.
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
        again = ", and later steps are repeated" if standing.checkpoint < standing.step else ""
        kept = f"the last checkpoint is of step {standing.checkpoint}{again}"
    asked = standing.from_step
    how = ["--resume"] if asked is None else ["--from-step", str(asked)]
    resume = [*command, f"run.dir={standing.run_dir}", *options, *how]
    return f"{begun}; {kept}; continue with\n  {shlex.join(resume)}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
