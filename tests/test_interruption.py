"""Signals that come while the main thread runs an event loop, at the very points where they would do harm."""

import asyncio
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron_stare.process import interruption
from megatron_stare.process.interruption import (
    Interruption,
    interruptible,
    makes_steps,
    open_to,
    raise_if_received,
    run_on,
    run_whole,
    start_on,
    uninterrupted,
)


@pytest.fixture
def current(caplog: pytest.LogCaptureFixture) -> Iterator[Interruption]:
    """Signals are those of a run, and Python must have nothing to say of what was left behind."""
    gc.collect()  # what earlier tests left is theirs
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with interruptible() as current:
            yield current
        makes_steps(None)
        gc.collect()
    assert [str(each.message) for each in said] == []
    records = [*caplog.get_records("call"), *caplog.get_records("teardown")]
    assert [each.getMessage() for each in records if each.name == "asyncio"] == []


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Work:
    """What is to be done, and whether it was begun and ended in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    async def done(self) -> str:
        self.notes.append("begun")
        try:
            await asyncio.Event().wait()
            return "done"
        finally:
            self.notes.append("ended")


def interrupted(coroutine: Coroutine[Any, Any, Any], number: int = signal.SIGINT) -> Coroutine[Any, Any, Any]:
    """It, and a signal before anyone has it."""
    signal.raise_signal(number)
    return coroutine


def runs(way: str, loop: asyncio.AbstractEventLoop) -> Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]:
    return run_whole if way == "whole" else lambda make: run_on(loop, make)


@pytest.mark.parametrize("way", ["whole", "stays"])
def test_a_signal_between_a_coroutine_and_its_task(current: Interruption, loop, way: str) -> None:
    work = Work()

    async def run() -> None:
        task = asyncio.create_task(interrupted(work.done()))
        try:
            await task
        finally:
            work.notes.append("outer ended")

    with pytest.raises(KeyboardInterrupt):
        runs(way, loop)(run)
    assert work.notes == ["outer ended"]  # the task was cancelled before its first turn
    assert current.number == signal.SIGINT
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("way", ["whole", "stays"])
def test_a_signal_before_the_loop_has_its_coroutine(current: Interruption, loop, way: str) -> None:
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        runs(way, loop)(lambda: interrupted(work.done()))
    assert work.notes == ["begun", "ended"]


def test_a_loop_that_stays_can_be_run_again(current: Interruption, loop) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_on(loop, lambda: interrupted(Work().done()))
    assert run_on(loop, lambda: asyncio.sleep(0, "result")) == "result"


def test_a_signal_before_a_coroutine_is_handed_to_another_threads_loop(current: Interruption, loop) -> None:
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    begun = threading.Event()

    async def work() -> None:
        begun.set()

    with pytest.raises(KeyboardInterrupt):
        start_on(loop, lambda: interrupted(work()))
    assert begun.wait(60)  # the thread's loop has it, and ends it when it is closed
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_an_error_of_the_cancelled_one_does_not_hide_the_signal(current: Interruption) -> None:
    async def run() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("as it was closed")

    with pytest.raises(KeyboardInterrupt):
        run_whole(run)


@pytest.mark.parametrize("waits", [True, False])
def test_a_loop_that_is_blocked_is_left(current: Interruption, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    monkeypatch.setattr(interruption, "LOOP_S", 0.05)
    turns = []

    async def run() -> None:
        signal.raise_signal(signal.SIGINT)
        while not waits:  # deaf to its cancellation once
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                turns.append("cancelled")
                if len(turns) == 2:
                    raise
        threading.Event().wait(600)

    with pytest.raises(KeyboardInterrupt):
        run_whole(run)
    assert turns == ([] if waits else ["cancelled"] * 2)


def test_where_processes_are_closed_the_loop_goes_on(current: Interruption, loop) -> None:
    async def run() -> str:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return "closed"

    with uninterrupted():
        assert run_whole(run) == run_on(loop, run) == "closed"
    assert current.raised
    assert run_whole(run) == "closed"  # it is owed, and what comes now is closing too


def test_another_threads_loop_goes_on_while_the_main_thread_is_interrupted(current: Interruption) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def run() -> str:
        begun.set()
        go_on.wait(60)
        await asyncio.sleep(0)
        return "done"

    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(run_whole, run)
        assert begun.wait(60)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        go_on.set()
        assert future.result() == "done"


def test_sigterm_outside_what_it_may_end_leaves_the_loop_and_keeps_its_limit(current: Interruption, loop) -> None:
    async def run() -> str:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        return "sent"

    makes_steps(600)
    assert run_on(loop, run) == "sent"
    assert not current.raised
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    with pytest.raises(KeyboardInterrupt), open_to(signal.SIGTERM):
        pytest.fail("entered, though SIGTERM was owed")


def test_sigterm_ends_a_loop_that_is_open_to_it(current: Interruption) -> None:
    work = Work()
    makes_steps(600)
    with pytest.raises(KeyboardInterrupt), open_to(signal.SIGTERM):
        run_whole(lambda: interrupted(work.done(), signal.SIGTERM))
    assert work.notes == ["begun", "ended"]
    assert not current.gave_up


def test_a_loop_within_an_update_that_takes_too_long_is_ended(current: Interruption) -> None:
    work = Work()
    makes_steps(0.05)
    with pytest.raises(KeyboardInterrupt):
        run_whole(lambda: interrupted(work.done(), signal.SIGTERM))
    assert work.notes == ["begun", "ended"]
    assert current.gave_up


class Closing:
    """Is told to end where nothing can be raised."""

    def __init__(self, number: int = signal.SIGINT, error: type[BaseException] | None = None) -> None:
        self.number, self.error = number, error

    def __del__(self) -> None:
        if self.error is not None:
            raise self.error
        signal.raise_signal(self.number)


@pytest.fixture
def unraised(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """The errors of destructors that the user would be shown."""
    found: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: found.append(lost.exc_type))
    return found


def test_what_a_destructor_swallows_is_raised_anew_and_not_shown(unraised, current: Interruption) -> None:
    def run() -> None:
        Closing()
        threading.Event().wait(600)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert unraised == []
    assert current.raised


def test_what_a_destructor_swallows_ends_a_loop_in_order(unraised, current: Interruption, monkeypatch) -> None:
    monkeypatch.setattr(interruption, "AGAIN_S", 600)
    work = Work()
    Closing()
    with pytest.raises(KeyboardInterrupt):
        run_whole(lambda: interrupted(work.done(), signal.SIGALRM))
    assert unraised == []
    assert work.notes == ["begun", "ended"]


def test_what_a_destructor_swallowed_is_raised_once(unraised, current: Interruption, monkeypatch) -> None:
    monkeypatch.setattr(interruption, "AGAIN_S", 600)
    Closing()
    with pytest.raises(KeyboardInterrupt):
        raise_if_received()
    signal.raise_signal(signal.SIGALRM)
    makes_steps(600)
    Closing(signal.SIGTERM)
    with open_to(signal.SIGTERM):  # it is being closed already
        pass
    assert unraised == []


def test_a_sigterm_that_was_swallowed_waits_where_it_may_not_raise_any_more(
    unraised, current: Interruption, monkeypatch
) -> None:
    monkeypatch.setattr(interruption, "AGAIN_S", 600)
    makes_steps(900)
    with open_to(signal.SIGTERM):
        Closing(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL)[0] <= 600
    signal.raise_signal(signal.SIGALRM)
    assert not current.raised and not current.gave_up
    assert 600 < signal.getitimer(signal.ITIMER_REAL)[0] <= 900  # the update under way has as long as before
    with pytest.raises(KeyboardInterrupt), open_to(signal.SIGTERM):
        pytest.fail("entered, though SIGTERM was owed")
    assert unraised == []


def test_errors_of_destructors_are_python_s_again_after_the_run(unraised) -> None:
    before = sys.unraisablehook
    with interruptible():
        assert sys.unraisablehook is not before
    assert sys.unraisablehook is before


def test_other_errors_of_destructors_are_shown(unraised, current: Interruption) -> None:
    Closing(error=ValueError)
    Closing(error=KeyboardInterrupt)  # nobody's signal
    assert unraised == [ValueError, KeyboardInterrupt]
