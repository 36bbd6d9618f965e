"""Verifies answers in worker processes. The run continues even if a worker process hangs, crashes
or is killed.

A caller submits all answers at once (`verify`) or one by one as they arrive (`verdicts.py`), and
receives one Verdict for each answer. Workers are independent processes (`rewards/process.py`). Each
worker judges one answer after another and replies over a socket. For each busy worker, the pool
records a deadline: the worker must judge its current answer before this deadline. The module does
not import torch, so any process can use it without loading torch.
"""

from __future__ import annotations

import math
import re
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_stare.errors import ConfigError
from megatron_stare.registry import Extension
from megatron_stare.rewards.process import WorkerProcess

# maximum number of answers sent to a worker at a time: small enough for an even distribution, large
# enough to hide the round trip
_CHUNK = 32
_START_LIMIT_S = 60.0  # limit for starting Python and importing the verifier
_STARTS = 3  # attempts to start a worker that is killed from outside while starting
_WHERE = "reward.verifier"
_KILLED = f"was killed by {signal.SIGKILL.name}"  # see WorkerProcess.kill


@dataclass(frozen=True)
class Verdict:
    """Outcome of judging one answer. If there is no reward, `reward` is None and `detail` states
    the reason.

    If the verifier exceeds the time limit, the answer counts as wrong (reward 0), so that a policy
    gains nothing from answers that make the verifier hang. If the verifier is a server and exceeds
    the time limit, the answer has no reward, because the server may have caused the delay.

    `answer_at` is the character index at which the answer begins. If the response has no answer in
    the right format, `answer_at` is -1. If the verifier does not report positions, `answer_at` is
    None. `answer` is the normal form of the response's answer (rewards/verifier.py), or "" if the
    response has no answer. If the verifier does not report normal forms, `answer` is None.
    """

    reward: float | None
    status: Literal["ok", "timeout", "crash"]
    detail: str = ""
    answer_at: int | None = None
    answer: str | None = None
    group: tuple[Verdict, ...] = ()  # for a group, the verdicts on its responses


@dataclass
class _Slot:
    """One worker and the items that were sent to the worker."""

    process: WorkerProcess
    # monotonic seconds: end of the time limit for the start, or for the first item; infinite when
    # idle
    deadline: float
    ready: bool = False
    starts: int = 1  # number of attempts to start this worker, including the current one
    items: deque[int] = field(default_factory=deque)  # sent and not yet answered, in order


Asked = tuple[str | list[str], str, Mapping[str, Any] | None]
"""One item to judge: a response or a group of responses, the reference answer, and columns of the
data row."""


@dataclass
class Answers:
    """Stores the answers that one caller submitted, and the verdicts that have arrived so far. The
    queue contains the answers that wait for a worker."""

    texts: dict[int, Asked] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    # verdicts that are not ok, in order of arrival
    failed: list[Verdict] = field(default_factory=list)
    # items judged again because their worker was killed from outside
    killed: set[int] = field(default_factory=set)
    added: int = 0

    def add(
        self, response: str | list[str], answer: str, columns: Mapping[str, Any] | None = None
    ) -> int:
        """Adds one item to the queue. An item is either one response, or a group of responses that
        the verifier judges together. Returns the item's number."""
        number, self.added = self.added, self.added + 1
        self.texts[number] = response, answer, columns
        self.queue.append(number)
        return number

    def take(self, item: int) -> Verdict:
        """Removes an item that has a verdict, and returns the verdict."""
        del self.texts[item]
        self.killed.discard(item)
        verdict = self.verdicts.pop(item)
        if verdict.status != "ok":
            self.failed.remove(verdict)
        return verdict

    def know(self, item: int, verdict: Verdict) -> None:
        """Records the verdict on an item."""
        self.verdicts[item] = verdict
        if verdict.status != "ok":
            self.failed.append(verdict)


class TooManyFailuresError(Exception):
    """Raised if verification failed for more answers than the caller allows.

    Args:
        failed: verdicts of the failed answers, in order of failure.
        known: number of answers that have a verdict, failed or not. The pool did not wait for the
            other answers.
    """

    def __init__(self, failed: Sequence[Verdict], known: int) -> None:
        super().__init__(failed, known)
        self.failed, self.known = failed, known


class VerifierPool:
    """A pool of worker processes that all run the same verifier. Only one thread at a time may use
    a pool. A pool is a context manager that closes itself on exit.

    Args:
        verifier: as in `make_verifier`.
        workers: number of processes, at least 1.
        timeout_s: wall-clock limit of one answer, seconds. The start of a worker does not count
            towards the limit.

    Raises:
        ConfigError: the verifier cannot be loaded, or does not load within 60 seconds.
    """

    def __init__(self, verifier: Extension | str, workers: int, timeout_s: float) -> None:
        self._verifier = Extension.read(verifier)
        self._timeout_s = timeout_s
        self._out_of_time = None if re.search(r"https?://", self._verifier.name) else 0.0
        self._selector = selectors.EpollSelector()
        self._slots: list[_Slot] = []
        self._closed = False
        # see rewards/verifier.py; set once a worker is ready
        self.judges_groups = self.needs_columns = False
        try:
            for _ in range(workers):
                self._slots.append(_Slot(*self._start()))
                self._watch(self._slots[-1])
            nothing = Answers()
            while not all(slot.ready for slot in self._slots):
                self._advance(nothing)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of the current workers. When the pool replaces a worker, the new
        worker has another process id than the old worker."""
        return [slot.process.pid for slot in self._slots]

    def verify(
        self, texts: Sequence[tuple[str, str] | Asked], most_failures: int | None = None
    ) -> list[Verdict]:
        """Returns one Verdict for each element of `texts`, in order. Each element of `texts` is
        (response, answer) or (response, answer, columns).

        Waits until all answers have a verdict. A worker may take at most `timeout_s` seconds for an
        answer. If an answer makes its worker hang or crash, the other answers are still verified.
        If SIGKILL ends a worker, another worker verifies the killed worker's current answer once
        more.

        Any exception, including Ctrl-C, closes the pool, so that workers do not go on verifying
        answers for which no caller waits.

        Args:
            most_failures: number of answers that may fail by a timeout or a crash; None: unlimited.
                The wait ends when one more answer fails.

        Raises:
            TooManyFailuresError: more answers failed than `most_failures`.
            ConfigError: a worker could not be restarted.
            ValueError: the pool is closed.
        """
        answers = Answers()
        for text in texts:
            answers.add(*text)
        while len(answers.verdicts) < len(texts):
            self.turn(answers, most_failures)
        return [answers.verdicts[item] for item in range(len(texts))]

    def turn(
        self, answers: Answers, most_failures: int | None = None, *, wait: bool = True
    ) -> None:
        """Sends waiting answers to idle workers, and handles messages from workers.

        Args:
            most_failures: see `verify`.
            wait: True: wait until a worker sends a message, ends or exceeds its time limit. False:
                process only what has already happened.

        Raises:
            The same exceptions as `verify`. Any exception, including Ctrl-C, closes the pool.
        """
        if self._closed:
            raise ValueError("the reward pool is closed")
        try:
            self._hand_out(answers)
            self._advance(answers, wait)
            # Send to idle workers now, because a caller that does not wait may return late.
            self._hand_out(answers)
            for slot in self._slots:
                self._watch(slot)
            if most_failures is not None and len(answers.failed) > most_failures:
                raise TooManyFailuresError(answers.failed, len(answers.verdicts))
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Returns a file descriptor for an event loop. When the file descriptor becomes readable,
        the caller must call `turn`. Raises ValueError if the pool is closed."""
        if self._closed:
            raise ValueError("the reward pool is closed")
        return self._selector.fileno()

    def seconds_left(self) -> float | None:
        """Returns the seconds until the earliest deadline of a worker, or None if no worker is
        busy. At the deadline, the caller must call `turn`."""
        deadline = min((slot.deadline for slot in self._slots), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def close(self) -> None:
        """Kills the workers and waits until they have ended. Idempotent."""
        self._closed = True
        for slot in self._slots:
            slot.process.kill()
        self._slots.clear()
        self._selector.close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _hand_out(self, answers: Answers) -> None:
        """Sends some of the waiting answers to every idle worker. When few answers are waiting,
        each worker gets fewer answers at once, so that all workers finish at about the same
        time."""
        for slot in self._slots:
            if not answers.queue:
                return
            if not slot.ready or slot.items:
                continue
            if not slot.process.alive:  # it died between two calls, not because of an answer
                self._stop(slot)
                self._replace(slot)
                continue
            share = max(1, min(_CHUNK, len(answers.queue) // (2 * len(self._slots))))
            slot.items.extend(answers.queue.popleft() for _ in range(share))
            slot.deadline = time.monotonic() + self._timeout_s
            slot.process.send([answers.texts[item] for item in slot.items])

    def _advance(self, answers: Answers, wait: bool = True) -> None:
        """Waits until a worker sends a message, ends, or exceeds its time limit. Then handles this
        event. If `wait` is False, `_advance` handles only the events that have already happened."""
        now = time.monotonic()
        for slot in self._slots:
            self._watch(slot)
        deadline = min(slot.deadline for slot in self._slots)
        left = None if deadline == math.inf else max(0.0, deadline - now)
        ready = self._selector.select(left if wait else 0.0)
        events = {key.fd: mask for key, mask in ready}
        for slot in self._slots:
            mask = events.get(slot.process.fileno(), 0)
            if mask & selectors.EVENT_WRITE:
                slot.process.flush()
            if mask & selectors.EVENT_READ:
                self._hear(slot, answers)
            # `now` is from before the wait, so that a message that came in time is read first, even
            # if this process was slow
            elif slot.deadline <= now:
                self._give_up(slot, answers)

    def _hear(self, slot: _Slot, answers: Answers) -> None:
        messages, ended = slot.process.receive()
        for message in messages:
            if isinstance(message, list):
                verdicts = tuple(_verdict(each) for each in message)
                answers.know(slot.items.popleft(), Verdict(None, "ok", group=verdicts))
            elif "ready" in message:
                slot.ready = True
                self.judges_groups = message["ready"]["groups"]
                self.needs_columns = message["ready"]["needs_columns"]
            elif "failed" in message:
                raise ConfigError(**message["failed"])
            else:
                answers.know(slot.items.popleft(), _verdict(message))
            slot.deadline = time.monotonic() + self._timeout_s if slot.items else math.inf
        if ended:
            fate = self._stop(slot)
            if not slot.ready:
                if fate == _KILLED and slot.starts < _STARTS:
                    self._replace(slot, slot.starts + 1)
                    return
                raise ConfigError(
                    f"the worker of {self._verifier!r} {fate} as it started", where=_WHERE
                )
            if fate == _KILLED and slot.items and slot.items[0] not in answers.killed:
                # killed by a user, or by the kernel because another process used the memory
                answers.killed.add(slot.items[0])
                self._return(slot, answers)
            else:
                self._lose(slot, answers, Verdict(None, "crash", f"the worker {fate}"))

    def _give_up(self, slot: _Slot, answers: Answers) -> None:
        if not slot.ready:
            raise ConfigError(
                f"verifier {self._verifier!r} did not load in {_START_LIMIT_S:g} s", where=_WHERE
            )
        self._stop(slot)
        self._lose(
            slot,
            answers,
            Verdict(self._out_of_time, "timeout", f"no verdict within {self._timeout_s:g} s"),
        )

    def _lose(self, slot: _Slot, answers: Answers, verdict: Verdict) -> None:
        """Replaces a worker that has ended. Records `verdict` as the verdict on the answer that the
        worker was verifying. Moves to the front of the queue all answers that the worker had
        received but not begun. Starts a new worker."""
        if slot.items:
            answers.know(slot.items.popleft(), verdict)
        self._return(slot, answers)

    def _return(self, slot: _Slot, answers: Answers) -> None:
        """Moves an ended worker's unverified answers back to the front of the queue. Starts a new
        worker that replaces the ended worker."""
        answers.queue.extendleft(reversed(slot.items))
        self._replace(slot)

    def _stop(self, slot: _Slot) -> str:
        self._selector.unregister(slot.process)
        return slot.process.kill()

    def _replace(self, slot: _Slot, starts: int = 1) -> None:
        slot.process, slot.deadline = self._start()
        slot.ready, slot.starts = False, starts
        slot.items.clear()
        self._watch(slot)

    def _start(self) -> tuple[WorkerProcess, float]:
        return WorkerProcess(self._verifier), time.monotonic() + _START_LIMIT_S

    def _watch(self, slot: _Slot) -> None:
        """Registers a worker's socket with the pool's I/O selector (Python's module `selectors`).
        The I/O selector reports the socket as ready if the socket has a message from the worker. If
        the pool has unsent data for the worker, a socket that can take more data also counts as
        ready. Makes no system call if the socket is already registered for the same kinds of
        events."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.process.sending else 0)
        if slot.process.fileno() in self._selector.get_map():
            self._selector.modify(slot.process, events)
        else:
            self._selector.register(slot.process, events)


def _verdict(message: dict[str, Any]) -> Verdict:
    if "error" in message:
        return Verdict(None, "crash", message["error"])
    return Verdict(
        message["reward"], "ok", answer_at=message["answer_at"], answer=message["answer"]
    )
