"""Verifies answers as soon as they arrive. The code of this module runs in the caller's event loop,
while the verifiers run in the worker processes of a VerifierPool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

from megatron_stare.rewards.verifier_pool import (
    Answers,
    TooManyFailuresError,
    Verdict,
    VerifierPool,
)

# number of new answers after which they are assigned at once, so that workers start while the rest
# arrives
EARLY = 32


class _Desk:
    """Connects a pool to an event loop. One _Desk serves all rollouts in the event loop: it assigns
    their answers to workers and delivers the verdicts.

    After the verdict on an answer is delivered, the answer is removed from memory.
    """

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self.rollouts = 0  # number of rollouts that use it
        self._answers = Answers()
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._new = 0  # answers since the last `_turn`
        self._something = asyncio.Event()
        self._error: Exception | None = None  # error of the pool, which ended `_serve`
        self._served = asyncio.create_task(self._serve())

    @property
    def judges_groups(self) -> bool:
        """Returns True if the verifier receives all responses to a prompt at once."""
        return self._pool.judges_groups

    @property
    def unfinished(self) -> bool:
        """Returns True if some answers have no verdict yet."""
        return bool(self._waiting)

    async def of(
        self, response: str | list[str], answer: str, columns: Mapping[str, Any] | None
    ) -> Verdict:
        """Waits for an answer's verdict and returns the verdict. Raises the pool's error if the
        pool has failed."""
        if self._error is not None:
            raise self._error
        future = asyncio.get_running_loop().create_future()
        self._waiting[self._answers.add(response, answer, columns)] = future
        self._new += 1
        if self._new >= EARLY:
            self._turn()
        self._something.set()
        return await future

    async def close(self) -> None:
        self._served.cancel()
        await asyncio.gather(self._served, return_exceptions=True)

    async def _serve(self) -> None:
        """Assigns answers to workers. Delivers every verdict to the caller that waits for the
        verdict. Runs until the task is cancelled or an error occurs.

        Wakes up when an answer is added, when a worker sends a message, or when a worker exceeds
        its time limit. If `_serve` fails with an error, all callers that wait for a verdict receive
        this error. Later calls of the method `of` raise the same error.
        """
        loop = asyncio.get_running_loop()
        try:
            with self._heard(loop):
                while True:
                    self._something.clear()
                    self._turn()
                    if self._error is not None:
                        return
                    # avoids asyncio.wait_for, which before Python 3.12 may lose a cancellation that
                    # coincides with the event
                    left = self._pool.seconds_left()
                    alarm = loop.call_later(left, self._something.set) if left is not None else None
                    await self._something.wait()
                    if alarm is not None:
                        alarm.cancel()
        except Exception as error:
            self._fail(error)

    def _turn(self) -> None:
        """Assigns waiting answers to idle workers, and delivers new verdicts to their callers."""
        self._new = 0
        try:
            self._pool.turn(self._answers, wait=False)
        except Exception as error:
            self._fail(error)
        for item in [item for item in self._waiting if item in self._answers.verdicts]:
            future, verdict = self._waiting.pop(item), self._answers.take(item)
            if not future.done():
                future.set_result(verdict)

    def _fail(self, error: Exception) -> None:
        self._error = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    @contextlib.contextmanager
    def _heard(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Context manager. Inside the `with` block, every message of a worker wakes `_serve`.
        Raises ValueError if the pool is closed."""
        number = self._pool.fileno()
        loop.add_reader(number, self._something.set)
        try:
            yield
        finally:
            loop.remove_reader(number)


class Verdicts:
    """Gets the verdicts on the answers of one rollout, and counts the answers whose verification
    failed.

    Create a Verdicts object by `async with verdicts(...)`.

    Args:
        most_failures: number of this rollout's answers that may fail through a timeout or a crash;
            None: unlimited.
    """

    def __init__(self, desk: _Desk, most_failures: int | None) -> None:
        self._desk, self._most_failures = desk, most_failures
        self._known = 0
        self._failed: list[Verdict] = []

    @property
    def judges_groups(self) -> bool:
        """Returns True if the verifier receives all responses to a prompt at once. If
        `judges_groups` is True, callers must call `Verdicts.of_group`. If `judges_groups` is False,
        callers must call `Verdicts.of`."""
        return self._desk.judges_groups

    async def of(
        self, response: str, answer: str, columns: Mapping[str, Any] | None = None
    ) -> Verdict:
        """Waits for the verdict on an answer and returns the verdict. Raises the pool's error if
        the pool has failed.

        Raises:
            TooManyFailuresError: more of the rollout's answers have failed than are allowed.
        """
        verdict = await self._desk.of(response, answer, columns)
        return self._take(verdict)

    async def of_group(
        self, responses: Sequence[str], answer: str, columns: Mapping[str, Any] | None = None
    ) -> list[Verdict]:
        """Waits until all responses to a prompt have verdicts, and returns these verdicts.
        `Verdicts.of` waits for the verdict on a single response. If the verification of the whole
        group times out or crashes, each response of the group counts as a failure."""
        whole = await self._desk.of(list(responses), answer, columns)
        return [self._take(each) for each in whole.group or [whole] * len(responses)]

    def given(
        self, reward: float | None, status: Literal["ok", "timeout", "crash"], detail: str
    ) -> Verdict:
        """Makes a Verdict from a reward that came from the environment instead of a verifier. If
        `status` is "timeout" or "crash", the new Verdict counts as a failure. A verifier's Verdict
        with the status "timeout" or "crash" counts as a failure too. Returns the new Verdict.
        Raises TooManyFailuresError under the same condition as `Verdicts.of`."""
        return self._take(Verdict(reward, status, detail))

    def _take(self, verdict: Verdict) -> Verdict:
        self._known += 1
        if verdict.status != "ok":
            self._failed.append(verdict)
            if self._most_failures is not None and len(self._failed) > self._most_failures:
                raise TooManyFailuresError(self._failed, self._known)
        return verdict


_DESKS: dict[VerifierPool, _Desk] = {}  # by pool, for pools with current rollouts


@contextlib.asynccontextmanager
async def verdicts(pool: VerifierPool, most_failures: int | None = None) -> AsyncIterator[Verdicts]:
    """Creates a Verdicts object for use inside an `async with` block. Several Verdicts objects can
    be in use in one event loop at the same time.

    Raises:
        ValueError: the pool is closed.
    """
    pool.fileno()
    desk = _DESKS.get(pool) or _DESKS.setdefault(pool, _Desk(pool))
    desk.rollouts += 1
    found = Verdicts(desk, most_failures)
    try:
        yield found
    finally:
        desk.rollouts -= 1
        if not desk.rollouts:
            del _DESKS[pool]
            await desk.close()
            if desk.unfinished:
                pool.close()  # workers are still judging answers that nobody waits for
