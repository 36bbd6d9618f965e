"""Signals to a command on its own thread: where they raise, where they do not, and that none is
lost."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.interrupts import interruptible as takes_ctrl_c

from megatron_stare.process import interruption
from megatron_stare.process.interruption import (
    ENDING,
    TO_BE_CONTINUED,
    Interruption,
    Standing,
    handlers_kept,
    is_to_be_saved,
    makes_steps,
    on_driver_thread,
    open_to,
    pause,
    poll,
    raise_if_received,
    run_on,
    run_whole,
    seconds_left,
    stopped_at,
    uninterrupted,
    wait_for,
)

LONG_S = 60.0


@pytest.fixture(autouse=True)
def taken() -> Iterator[None]:
    """Ctrl-C is taken, whoever started pytest; and nothing is left behind that Python would
    complain of."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()  # what earlier tests left is theirs
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
        gc.collect()
    signal.signal(signal.SIGINT, before)
    assert [str(each.message) for each in said] == []


def driven(body: Callable[[Interruption], Any]) -> Any:
    """Runs it as a command whose exit code is of no matter; returns what it returned."""
    return on_driver_thread(body, lambda _: "last words")


def send(*numbers: int) -> None:
    """Sends this process signals, one after the other, and waits until the main thread has taken
    each."""
    current = interruption._current
    for number in numbers:
        before = len(said_of(current))
        os.kill(os.getpid(), number)
        until(lambda before=before: len(said_of(current)) > before)


def said_of(current: Interruption) -> list[Any]:
    """List that grows whenever a signal is taken."""
    return current.__dict__.setdefault("taken_by_test", [])


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Interruption.take

    def noted(self: Interruption, number: int) -> bool:
        result = take(self, number)
        said_of(self).append(number)
        return result

    monkeypatch.setattr(Interruption, "take", noted)


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Work:
    """Work to be done, which notes that it was begun and ended in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def done(self) -> str:
        self.notes.append("begun")
        try:
            await asyncio.Event().wait()
            return "done"
        finally:
            self.notes.append("ended")


async def signalled(work: Work, *numbers: int) -> str:
    """The work, in whose loop signals come."""
    task = asyncio.ensure_future(work.done())
    await asyncio.sleep(0)
    send(*numbers)
    return await task


def test_a_signal_raises_at_the_next_poll_and_once(capfd: pytest.CaptureFixture[str]) -> None:
    def body(current: Interruption) -> int:
        poll()
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            poll()
        poll()  # it is being closed already
        assert current.raised
        return current.exit_code

    assert driven(body) == 130
    assert capfd.readouterr().err == "SIGINT: closing the run, which takes some seconds\n"


class Closing:
    """Is signalled where nothing can be raised."""

    def __del__(self) -> None:
        send(signal.SIGTERM)


def test_a_signal_in_a_destructor_is_not_lost() -> None:
    def body(current: Interruption) -> int:
        Closing()
        with pytest.raises(KeyboardInterrupt):
            poll()
        return current.exit_code

    assert driven(body) == 143


@pytest.mark.parametrize("way", ["whole", "stays"])
def test_a_signal_cancels_what_the_loop_runs_and_raises_when_it_has_ended(way: str) -> None:
    work, loop = Work(), asyncio.new_event_loop()
    run = run_whole if way == "whole" else partial(run_on, loop)

    def body(current: Interruption) -> int:
        with pytest.raises(KeyboardInterrupt):
            run(lambda: signalled(work, signal.SIGINT))
        assert run_on(loop, lambda: asyncio.sleep(0, "again")) == "again"
        return 0

    driven(body)
    loop.close()
    assert work.notes == ["begun", "ended"]


def test_a_signal_before_the_loop_leaves_no_coroutine() -> None:
    made = []

    def body(current: Interruption) -> None:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            run_whole(lambda: made.append("made"))  # type: ignore[arg-type,return-value]

    driven(body)
    assert made == []


def test_an_error_or_a_result_of_the_cancelled_one_does_not_hide_the_signal() -> None:
    async def fails() -> None:
        send(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("as it was closed")

    async def answers() -> str:
        send(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "all the same"
        return ""

    for made in (fails, answers):
        with pytest.raises(KeyboardInterrupt):
            driven(lambda _, made=made: run_whole(made))


def test_what_closes_is_not_cut_short_and_the_signal_is_owed() -> None:
    async def closes() -> str:
        send(signal.SIGINT)
        await asyncio.sleep(0)
        return "closed"

    def body(current: Interruption) -> None:
        with uninterrupted():
            assert run_whole(closes) == "closed"
            poll()
            wait_for(finished("result"))
        assert not current.raised
        with pytest.raises(KeyboardInterrupt):
            poll()

    driven(body)


def finished(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


@pytest.mark.parametrize("number", ENDING)
def test_of_a_run_that_makes_steps_the_update_ends_first(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async def sends() -> str:
        send(number)
        await asyncio.sleep(0)
        return "sent"

    def body(current: Interruption) -> int:
        makes_steps(600)
        assert run_whole(sends) == "sent"
        poll()  # in the update
        assert 590 < (seconds_left() or 0) <= 600
        with pytest.raises(KeyboardInterrupt):
            raise_if_received()  # after it
        assert is_to_be_saved() and not current.gave_up
        return current.exit_code

    assert driven(body) == 128 + number
    said = (
        f"{signal.Signals(number).name}: the run is saved and closed after the update under way\n"
    )
    assert capfd.readouterr().err == said


def test_what_is_open_to_a_signal_is_ended_by_it_before_and_meanwhile() -> None:
    def before(current: Interruption) -> None:
        makes_steps(600)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), open_to(signal.SIGTERM):
            pytest.fail("entered, though SIGTERM was owed")

    work = Work()

    def meanwhile(current: Interruption) -> None:
        makes_steps(600)
        with pytest.raises(KeyboardInterrupt), open_to(signal.SIGTERM):
            run_whole(lambda: signalled(work, signal.SIGTERM))
        assert is_to_be_saved()

    def another(current: Interruption) -> None:
        makes_steps(600)
        with open_to(signal.SIGTERM):
            send(signal.SIGUSR1)
            poll()
        with pytest.raises(KeyboardInterrupt), open_to(signal.SIGUSR1):
            pytest.fail("entered, though SIGUSR1 was owed")

    for body in (before, meanwhile, another):
        driven(body)
    assert work.notes == ["begun", "ended"]


def test_an_update_that_takes_too_long_is_ended_and_not_saved(
    capfd: pytest.CaptureFixture[str],
) -> None:
    work = Work()

    def body(current: Interruption) -> None:
        makes_steps(0.05)
        with pytest.raises(KeyboardInterrupt):
            run_whole(lambda: signalled(work, signal.SIGTERM))
        assert current.gave_up and not is_to_be_saved()

    driven(body)
    assert work.notes == ["begun", "ended"]
    assert "0.05 s are over: closing the run without a checkpoint" in capfd.readouterr().err


def test_who_waits_for_a_step_can_be_hurried(capfd: pytest.CaptureFixture[str]) -> None:
    def body(current: Interruption) -> int:
        makes_steps(600)
        send(signal.SIGUSR1)
        assert seconds_left() is None
        with open_to(signal.SIGTERM):
            poll()
        send(signal.SIGUSR1, signal.SIGTERM)
        assert seconds_left() is not None
        with pytest.raises(KeyboardInterrupt), open_to(signal.SIGTERM):
            poll()
        return current.exit_code

    assert driven(body) == 143
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["SIGUSR1", "SIGUSR1", "SIGTERM"]
    assert "already closing" in lines[1] and "update under way" in lines[2]


def test_the_code_of_a_run_that_was_saved_after_its_step() -> None:
    def body(current: Interruption) -> int:
        makes_steps(600)
        send(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            raise_if_received()
        stopped_at(Standing(Path("run"), 3, 9, 3))
        return current.exit_code

    assert driven(body) == TO_BE_CONTINUED


def test_waits_are_ended_and_give_what_they_waited_for() -> None:
    failed: Future[Any] = Future()
    failed.set_exception(TimeoutError("its own"))

    def body(current: Interruption) -> None:
        assert wait_for(finished(5)) == 5
        with pytest.raises(TimeoutError, match="its own"):
            wait_for(failed)
        pause(0.01)
        for wait in (lambda: wait_for(Future()), lambda: pause(LONG_S)):
            threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            current.raised, current.number = False, None

    driven(body)


def test_no_other_thread_is_interrupted() -> None:
    def body(current: Interruption) -> None:
        send(signal.SIGINT)
        other: Future[str] = Future()

        def elsewhere() -> None:
            poll()
            raise_if_received()
            other.set_result(run_whole(lambda: asyncio.sleep(0, "done")))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        assert other.result(LONG_S) == "done"
        thread.join()

    driven(body)


def test_the_command_s_errors_and_context_are_the_caller_s_and_signals_as_before() -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting")
    setting.set("the caller's")
    before = [signal.getsignal(number) for number in interruption.SIGNALS]
    assert driven(lambda _: setting.get()) == "the caller's"

    def fails(current: Interruption) -> None:
        assert threading.current_thread().name == interruption.DRIVER
        raise ValueError("of the command")

    with pytest.raises(ValueError, match="of the command"):
        driven(fails)
    assert [signal.getsignal(number) for number in interruption.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_handlers_that_a_library_takes_over_are_put_back() -> None:
    """Handlers are taken over as by Ray's core, with one of C: here the system's own, which would
    end this process."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p

    def body(current: Interruption) -> int:
        with handlers_kept():
            libc.signal(signal.SIGTERM, None)  # SIG_DFL
            until(lambda: _caught(signal.SIGTERM))
            libc.signal(signal.SIGTERM, None)
        assert _caught(signal.SIGTERM)
        libc.alarm(1)  # as its handler sets it before it calls ours
        send(signal.SIGTERM)
        assert libc.alarm(0) == 0
        with pytest.raises(KeyboardInterrupt):
            poll()
        return current.exit_code

    assert driven(body) == 143


def _caught(number: int) -> bool:
    """Asks the kernel if this process has a handler of the signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text())
    return bool(caught and int(caught[1], 16) & 1 << number - 1)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:

        def body(current: Interruption) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            poll()
            send(signal.SIGTERM)
            assert current.number == signal.SIGTERM

        driven(body)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_elsewhere_than_in_the_main_thread_the_command_runs_where_it_is() -> None:
    found: Future[str] = Future()

    def elsewhere() -> None:
        driven(lambda _: found.set_result(threading.current_thread().name))

    thread = threading.Thread(target=elsewhere, name="a notebook's")
    thread.start()
    assert found.result(LONG_S) == "a notebook's"
    thread.join()


def test_a_process_with_many_open_files_takes_signals() -> None:
    """select.select refuses descriptors from 1024 on."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2_048), before[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]

    def body(current: Interruption) -> int:
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            pause(LONG_S)
        return current.exit_code

    try:
        assert driven(body) == 143
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_error_of_the_main_thread_leaves_no_command_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def body(current: Interruption) -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    def fails(self: Interruption) -> None:
        begun.wait(LONG_S)
        raise OSError("no descriptor is left")

    monkeypatch.setattr(Interruption, "look", fails)
    with pytest.raises(OSError, match="no descriptor is left"):
        driven(body)
    assert ended.is_set()


def test_the_command_may_be_called_within_a_running_loop() -> None:
    async def notebook() -> str:
        return driven(lambda _: run_whole(lambda: asyncio.sleep(0, "done")))

    assert asyncio.run(notebook()) == "done"


DEAF = """
import subprocess, sys, time
from pathlib import Path
from megatron_stare.process import interruption
interruption.UNHEARD_S = float(sys.argv[1])
def body(current):
    interruption.stands_at(lambda: interruption.Standing(Path("run"), 4, 9, 2))
    with interruption.temporary_folder() as folder:
        sleep = "print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
        command = [sys.executable, "-c", f"import subprocess; {sleep}; input()"]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        below = started.stdout.readline().decode().strip()
        print(started.pid, below, folder, flush=True)
        while True:
            time.sleep(600)
def told(i):
    return f"stands at {i.last_words().step}, saves: {not i.gave_up}"
sys.exit(interruption.on_driver_thread(body, told, sys.argv[2] == "True"))
"""


@pytest.fixture
def deaf() -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int], Path]]]:
    """A command that never polls, with a child and a grandchild."""
    started: list[subprocess.Popen[str]] = []

    def begin(
        unheard_s: float, hurries: bool = True
    ) -> tuple[subprocess.Popen[str], list[int], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", DEAF, str(unheard_s), str(hurries)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=takes_ctrl_c,
        )
        started.append(process)
        *pids, folder = process.stdout.readline().split()
        return process, [int(pid) for pid in pids], Path(folder)

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_second_ctrl_c_ends_the_process_and_what_it_started_at_once(deaf) -> None:
    process, below, folder = deaf(LONG_S)
    assert all(map(alive, below)) and folder.exists()
    process.send_signal(signal.SIGINT)
    assert "SIGINT: closing the run" in process.stderr.readline()
    process.send_signal(signal.SIGINT)  # as a launcher forwards what its group has had
    assert "SIGINT: already closing" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: already closing" in process.stderr.readline()
    threading.Event().wait(interruption.SAME_S)
    process.send_signal(signal.SIGINT)
    assert (
        process.stderr.read()
        == "SIGINT: ending at once, without saving\nstands at 4, saves: False\n"
    )
    assert process.wait() == 130
    assert not any(map(alive, below)) and not folder.exists()


@pytest.mark.parametrize("hurries", [True, False])
def test_a_command_that_does_not_poll_is_ended(deaf, hurries: bool) -> None:
    process, below, folder = deaf(0.1, hurries)
    process.send_signal(signal.SIGTERM)
    said = process.stderr.read().splitlines()
    assert said[1:] == [
        "the run did not close in time: ending at once, without saving",
        "stands at 4, saves: False",
    ]
    assert process.wait() == 143
    assert not any(map(alive, below)) and not folder.exists()


def test_a_command_that_does_not_hurry_outlives_an_interrupt_that_it_does_not_hear(deaf) -> None:
    process, below, folder = deaf(0.1, hurries=False)
    process.send_signal(signal.SIGINT)
    assert "SIGINT: closing the run" in process.stderr.readline()
    assert process.stderr.readline() == (
        "waiting for code that cannot be interrupted; a second interrupt ends the process, without"
        " saving\n"
    )
    threading.Event().wait(max(interruption.SAME_S, 3 * interruption.TICK_S))
    assert process.poll() is None and all(map(alive, below)) and folder.exists()
    process.send_signal(signal.SIGINT)
    assert (  # said once
        process.stderr.read()
        == "SIGINT: ending at once, without saving\nstands at 4, saves: False\n"
    )
    assert process.wait() == 130
