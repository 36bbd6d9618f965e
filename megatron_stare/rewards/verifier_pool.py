"""Judges answers in worker processes that may hang, crash or be killed without harm to the run.

Whoever has answers hands them in all at once (`verify`) or as they come (`verdicts.py`) and gets
one Verdict each. Workers are independent processes (`rewards/process.py`) that answer one by one
over a socket; this side keeps a deadline for the answer each worker is at. Imports no torch, so it
can live in any process.
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

# answers handed to a worker at a time: few enough to share out evenly, many enough to hide the
# round trip
_CHUNK = 32
_START_LIMIT_S = 60.0  # to start Python and import the verifier
_STARTS = 3  # of a worker that is killed from outside as it starts
_WHERE = "reward.verifier"
_KILLED = f"was killed by {signal.SIGKILL.name}"  # see WorkerProcess.kill


@dataclass(frozen=True)
class Verdict:
    """Outcome for one answer. `reward` is None where there is none, and `detail` says why.

    An answer whose verifier runs out of time is wrong, 0, so that a policy gains nothing by answers
    that hang. Where the verifier is a server, the server may be what hangs, and there is no reward.

    `answer_at` is the character where the answer begins, -1 where none stands in the right format,
    and None where the verifier does not say. `answer` is its normal form (rewards/verifier.py), ""
    where there is none, None as above.
    """

    reward: float | None
    status: Literal["ok", "timeout", "crash"]
    detail: str = ""
    answer_at: int | None = None
    answer: str | None = None
    group: tuple[Verdict, ...] = ()  # where the answer was a whole group, those of its responses


@dataclass
class _Slot:
    """One worker and what it is at."""

    process: WorkerProcess
    # monotonic seconds: end of the start's limit, or of the first item's; infinite when idle
    deadline: float
    ready: bool = False
    starts: int = 1  # of this worker that came to nothing, and the one that goes on
    items: deque[int] = field(default_factory=deque)  # handed out and not yet answered, in order


Asked = tuple[str | list[str], str, Mapping[str, Any] | None]
"""A response or a group, the answer, and columns of the row."""


@dataclass
class Answers:
    """Answers that belong together: what is still to be handed out, and what is known."""

    texts: dict[int, Asked] = field(default_factory=dict)
    queue: deque[int] = field(default_factory=deque)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    # those of `verdicts` that are not ok, as they came
    failed: list[Verdict] = field(default_factory=list)
    # items whose worker was killed once from outside; judged again
    killed: set[int] = field(default_factory=set)
    added: int = 0

    def add(
        self, response: str | list[str], answer: str, columns: Mapping[str, Any] | None = None
    ) -> int:
        """Adds one, or a group that is judged as one; returns its number."""
        number, self.added = self.added, self.added + 1
        self.texts[number] = response, answer, columns
        self.queue.append(number)
        return number

    def take(self, item: int) -> Verdict:
        """A verdict that is known; nothing is kept of the answer."""
        del self.texts[item]
        self.killed.discard(item)
        verdict = self.verdicts.pop(item)
        if verdict.status != "ok":
            self.failed.remove(verdict)
        return verdict

    def know(self, item: int, verdict: Verdict) -> None:
        """Takes an answer's verdict."""
        self.verdicts[item] = verdict
        if verdict.status != "ok":
            self.failed.append(verdict)


class TooManyFailuresError(Exception):
    """More answers could not be verified than the caller bears.

    Args:
        failed: the verdicts on those, in the order in which they failed.
        known: answers that have a Verdict, of either kind; the others were not waited for.
    """

    def __init__(self, failed: Sequence[Verdict], known: int) -> None:
        super().__init__(failed, known)
        self.failed, self.known = failed, known


class VerifierPool:
    """Worker processes that run one verifier. Use from one thread at a time; a context manager.

    Args:
        verifier: as in `make_verifier`.
        workers: number of processes, at least 1.
        timeout_s: wall-clock limit of one answer, seconds. Starting a worker does not count against
            it.

    Raises:
        ConfigError: the verifier cannot be loaded, or not within 60 seconds.
    """

    def __init__(self, verifier: Extension | str, workers: int, timeout_s: float) -> None:
        self._verifier = Extension.read(verifier)
        self._timeout_s = timeout_s
        self._out_of_time = None if re.search(r"https?://", self._verifier.name) else 0.0
        self._selector = selectors.EpollSelector()
        self._slots: list[_Slot] = []
        self._closed = False
        self.judges_groups = self.needs_columns = False  # see rewards/verifier.py; known once ready
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
        """Process ids of the workers as of now; a worker that was killed has a successor with
        another id."""
        return [slot.process.pid for slot in self._slots]

    def verify(
        self, texts: Sequence[tuple[str, str] | Asked], most_failures: int | None = None
    ) -> list[Verdict]:
        """One Verdict for each (response, answer), or (response, answer, columns), in order.

        Waits for the workers, at most `timeout_s` for each answer; an answer that hangs or takes
        its worker down costs itself alone. One whose worker is killed (SIGKILL) is judged once more
        by another.

        An exception, Ctrl-C included, closes the pool: workers may be in the middle of answers
        nobody waits for.

        Args:
            most_failures: answers without a reward that are borne; with one more the rest is not
                waited for. None: any.

        Raises:
            TooManyFailuresError: there were more.
            ConfigError: a worker could not be started again.
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
        """Hands answers to idle workers and takes what workers have to say.

        Args:
            most_failures: see `verify`.
            wait: until a worker speaks, ends or is out of time; False: only what is known already.

        Raises:
            As `verify`; an exception, Ctrl-C included, closes the pool.
        """
        if self._closed:
            raise ValueError("the reward pool is closed")
        try:
            self._hand_out(answers)
            self._advance(answers, wait)
            # Hand out to idle workers now: a caller that does not wait may not come back at once.
            self._hand_out(answers)
            for slot in self._slots:
                self._watch(slot)
            if most_failures is not None and len(answers.failed) > most_failures:
                raise TooManyFailuresError(answers.failed, len(answers.verdicts))
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Readable when a `turn` has something to do; for event loops. Raises ValueError where the
        pool is closed."""
        if self._closed:
            raise ValueError("the reward pool is closed")
        return self._selector.fileno()

    def seconds_left(self) -> float | None:
        """Until a worker is out of time, which a `turn` must then be told of; None: none is at
        work."""
        deadline = min((slot.deadline for slot in self._slots), default=math.inf)
        return None if deadline == math.inf else max(0.0, deadline - time.monotonic())

    def close(self) -> None:
        """Kills the workers; when it returns there is none. May be called again."""
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
        """Gives every idle worker a share of what is left; shares shrink towards the end, so that
        none waits long."""
        for slot in self._slots:
            if not answers.queue:
                return
            if not slot.ready or slot.items:
                continue
            if not slot.process.alive:  # it died between two calls, and no answer is to blame
                self._stop(slot)
                self._replace(slot)
                continue
            share = max(1, min(_CHUNK, len(answers.queue) // (2 * len(self._slots))))
            slot.items.extend(answers.queue.popleft() for _ in range(share))
            slot.deadline = time.monotonic() + self._timeout_s
            slot.process.send([answers.texts[item] for item in slot.items])

    def _advance(self, answers: Answers, wait: bool = True) -> None:
        """Waits until a worker speaks, ends or is out of time, and deals with it."""
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
            # the time before the wait: a message that came in time is heard first, even if we were
            # slow
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
                # killed by somebody, or by the kernel for memory that another process took
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
        """Blames the answer the worker was at, returns the others to the front of the queue, starts
        a new worker."""
        if slot.items:
            answers.know(slot.items.popleft(), verdict)
        self._return(slot, answers)

    def _return(self, slot: _Slot, answers: Answers) -> None:
        """Returns what a worker had to the front of the queue, starts a new worker."""
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
        """Tells the selector what to wait for; free of system calls where nothing has changed."""
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
