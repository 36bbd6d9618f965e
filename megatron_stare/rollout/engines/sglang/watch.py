"""Checks that a server is alive and holds the weights that it received.

The run checks a server after a failed call, and periodically while a call waits for the server's
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Any

from megatron_stare.rollout.engines.engine import EngineLostError
from megatron_stare.rollout.engines.sglang.client import SGLangClient
from megatron_stare.rollout.engines.sglang.protocol import SGLangError
from megatron_stare.rollout.engines.sglang.server import ServerProcess

# A blocked event loop can mistake a punctual answer for a late one, but not twice in a row.
ATTEMPTS, PAUSE_S = 2, 0.2


class ServerGoneError(EngineLostError, SGLangError):
    """A server is lost.

    `late`: True if the server did not answer within the time limit. If `late` is True, the server
        may still be running.
    """

    late = False


class Watch:
    """Health check of one server. The check runs in the event loop of the server's client.

    Args:
        process: process of the server, or None if the run did not start the server.
        held: function that returns the weight version that the server must hold now. `held` returns
            None if the server may hold any version.
        limit_s: time limit for an answer of the server.
    """

    def __init__(
        self,
        client: SGLangClient,
        process: ServerProcess | None,
        held: Callable[[], int | None],
        limit_s: float,
    ) -> None:
        self._client, self._process, self._held, self._limit_s = client, process, held, limit_s
        self.gone = False  # True once the server was found to be lost
        self._looking: asyncio.Task[None] | None = None  # shared by concurrent callers
        self._watching: asyncio.Task[None] | None = None

    async def require(self) -> None:
        """Checks the server. The check asks the server at most ATTEMPTS times, and waits at most
        `limit_s` seconds for each answer. Raises ServerGoneError if the server is lost."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def first_of(
        self, tasks: Collection[asyncio.Task[Any]], limit_s: float | None = None
    ) -> set[Any]:
        """Waits until one of the tasks is done or `limit_s` seconds have passed. Returns the
        finished tasks.

        While this method waits, the watch checks the server periodically. The interval between two
        checks is the constructor's `limit_s`, not this method's `limit_s`. Raises ServerGoneError
        if the server is lost before one of the tasks is done.
        """
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        done, _ = await asyncio.wait(
            {*tasks, self._watching}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
        )
        if done == {self._watching}:
            self._watching.result()
        return done - {self._watching}

    async def _watch(self) -> None:
        """Checks the server periodically until a check raises an error."""
        while True:
            await asyncio.sleep(self._limit_s)
            await self.require()

    async def _look(self) -> None:
        try:
            await self._ask()
        except ServerGoneError:
            self.gone = True
            raise

    async def _ask(self) -> None:
        self.require_process()
        last: ServerGoneError | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            held = self._held()
            try:
                info = await asyncio.wait_for(self._client.model_info(), self._limit_s)
            except TimeoutError:
                last = ServerGoneError(
                    f"the server has not answered for {self._limit_s:g} s", where=self._client.url
                )
                last.late = True
                continue
            except SGLangError as error:
                last = ServerGoneError(error.what, where=self._client.url)
                continue
            told = info.get("weight_version")
            if None in (held, told) or held != self._held() or told == str(held):
                return
            raise ServerGoneError(
                f"the server holds weights of version {told}, not {held} as it was sent: the"
                " server was restarted",
                where=self._client.url,
            )
        self.require_process()
        assert last is not None
        raise last

    def require_process(self) -> None:
        """Raises ServerGoneError if the run started the server and the server's process has ended.
        The error contains the end of the server's log."""
        try:
            if self._process is not None:
                self._process.require_alive()
        except SGLangError as error:
            raise ServerGoneError(error.what, where=error.where) from error

    async def close(self) -> None:
        """Cancels checks in progress."""
        tasks = [task for task in (self._looking, self._watching) if task is not None]
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
