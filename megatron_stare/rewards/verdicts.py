"""Answers verified as they come, in the event loop of whoever makes them, by the worker processes of a VerifierPool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from megatron_stare.rewards.verifier_pool import Answers, Verdict, VerifierPool


class Verdicts:
    """The answers of one rollout. `async with verdicts(...)` makes and ends it.

    Args:
        most_failures: answers without a reward that are borne; see VerifierPool.verify.
    """

    def __init__(self, pool: VerifierPool, most_failures: int | None) -> None:
        self._pool, self._most_failures = pool, most_failures
        self._answers = Answers()
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._something = asyncio.Event()
        self._error: Exception | None = None  # that ended `serve`

    @property
    def unfinished(self) -> bool:
        """Answers are still without a verdict."""
        return len(self._answers.verdicts) < len(self._answers.texts)

    async def of(self, response: str, answer: str) -> Verdict:
        """Waits for the answer's verdict; unblocked by it, or by the pool's error, which it raises."""
        if self._error is not None:
            raise self._error
        future = asyncio.get_running_loop().create_future()
        self._waiting[self._answers.add(response, answer)] = future
        self._something.set()
        return await future

    async def serve(self) -> None:
        """Hands answers out and gives verdicts back, until it is cancelled.

        Waits for an answer to come, a worker's word or the end of a worker's time; unblocked by each. Its error becomes
        that of everyone who waits, or comes later.
        """
        loop = asyncio.get_running_loop()
        try:
            with self._heard(loop):
                while True:
                    self._something.clear()
                    self._pool.turn(self._answers, self._most_failures, wait=False)
                    for item in [item for item in self._waiting if item in self._answers.verdicts]:
                        self._waiting.pop(item).set_result(self._answers.verdicts[item])
                    # not asyncio.wait_for, which before Python 3.12 may lose a cancellation that comes with the event
                    left = self._pool.seconds_left()
                    alarm = loop.call_later(left, self._something.set) if left is not None else None
                    await self._something.wait()
                    if alarm is not None:
                        alarm.cancel()
        except Exception as error:
            self._error = error
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)

    @contextlib.contextmanager
    def _heard(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """While open, workers that speak are something. Raises ValueError where the pool is closed."""
        number = self._pool.fileno()
        loop.add_reader(number, self._something.set)
        try:
            yield
        finally:
            loop.remove_reader(number)


@contextlib.asynccontextmanager
async def verdicts(pool: VerifierPool, most_failures: int | None = None) -> AsyncIterator[Verdicts]:
    """Verdicts that are given while the block runs."""
    found = Verdicts(pool, most_failures)
    served = asyncio.create_task(found.serve())
    try:
        yield found
    finally:
        served.cancel()
        await asyncio.gather(served, return_exceptions=True)
        if found.unfinished:
            pool.close()  # workers are in the middle of answers that nobody waits for
