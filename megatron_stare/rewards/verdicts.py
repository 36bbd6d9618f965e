"""Answers verified as they come, in the event loop of whoever makes them, by the worker processes
of a VerifierPool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from megatron_stare.rewards.verifier_pool import (
    Answers,
    TooManyFailuresError,
    Verdict,
    VerifierPool,
)

# answers that are handed out before their loop is back: workers begin while the rest is still made
EARLY = 32


class _Desk:
    """Desk of a pool in one event loop: hands out answers and gives back verdicts, for all rollouts
    under way there.

    Keeps no answer that has its verdict.
    """

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self.rollouts = 0  # that come here
        self._answers = Answers()
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._new = 0  # answers since workers were last looked at
        self._something = asyncio.Event()
        self._error: Exception | None = None  # of the pool, which ends `_serve`
        self._served = asyncio.create_task(self._serve())

    @property
    def judges_groups(self) -> bool:
        """Returns True if the verifier is given all responses to a prompt at once."""
        return self._pool.judges_groups

    async def of(
        self, response: str | list[str], answer: str, columns: Mapping[str, Any] | None
    ) -> Verdict:
        """Waits for the answer's verdict; unblocked by it, or by the pool's error, which it
        raises."""
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
        """Hands answers out and gives verdicts back, until it is cancelled.

        Waits for an answer to come, a worker's word or the end of a worker's time; unblocked by
        each. Its error becomes that of everyone who waits, or comes later.
        """
        loop = asyncio.get_running_loop()
        try:
            with self._heard(loop):
                while True:
                    self._something.clear()
                    self._turn()
                    if self._error is not None:
                        return
                    # not asyncio.wait_for, which before Python 3.12 may lose a cancellation that
                    # comes with the event
                    left = self._pool.seconds_left()
                    alarm = loop.call_later(left, self._something.set) if left is not None else None
                    await self._something.wait()
                    if alarm is not None:
                        alarm.cancel()
        except Exception as error:
            self._fail(error)

    def _turn(self) -> None:
        """Hands out what waits, and gives back what is judged."""
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
        """While open, workers that speak are something. Raises ValueError where the pool is
        closed."""
        number = self._pool.fileno()
        loop.add_reader(number, self._something.set)
        try:
            yield
        finally:
            loop.remove_reader(number)


class Verdicts:
    """The answers of one rollout. `async with verdicts(...)` makes and ends it.

    Args:
        most_failures: answers without a reward that are borne, of this rollout; None: any number.
    """

    def __init__(self, desk: _Desk, most_failures: int | None) -> None:
        self._desk, self._most_failures = desk, most_failures
        self._asked = self._known = 0
        self._failed: list[Verdict] = []

    @property
    def unfinished(self) -> bool:
        """Answers are still without a verdict."""
        return self._known < self._asked

    @property
    def judges_groups(self) -> bool:
        """Returns True if verdicts are asked for with `of_group`, else with `of`."""
        return self._desk.judges_groups

    async def of(
        self, response: str, answer: str, columns: Mapping[str, Any] | None = None
    ) -> Verdict:
        """Waits for the answer's verdict; unblocked by it, or by the pool's error, which it raises.

        Raises:
            TooManyFailuresError: with this one more answers failed than are borne.
        """
        self._asked += 1
        verdict = await self._desk.of(response, answer, columns)
        return self._take(verdict)

    async def of_group(
        self, responses: Sequence[str], answer: str, columns: Mapping[str, Any] | None = None
    ) -> list[Verdict]:
        """Waits as `of` for the verdicts on all responses to a prompt. A group that fails as a
        whole is a failure of each response."""
        self._asked += len(responses)
        whole = await self._desk.of(list(responses), answer, columns)
        return [self._take(each) for each in whole.group or [whole] * len(responses)]

    def _take(self, verdict: Verdict) -> Verdict:
        self._known += 1
        if verdict.status != "ok":
            self._failed.append(verdict)
            if self._most_failures is not None and len(self._failed) > self._most_failures:
                raise TooManyFailuresError(self._failed, self._known)
        return verdict


_DESKS: dict[VerifierPool, _Desk] = {}  # of the pools that have rollouts under way


@contextlib.asynccontextmanager
async def verdicts(pool: VerifierPool, most_failures: int | None = None) -> AsyncIterator[Verdicts]:
    """Verdicts that are given while the block runs. Several blocks may run at a time, in one event
    loop.

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
        if found.unfinished:
            pool.close()  # workers are in the middle of answers that nobody waits for
