"""Fake SGLang servers behind real sockets that fail as they are told to, and a router in front of
them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import aiohttp
from aiohttp import web
from support.sglang_fake import FakeServer

# What becomes of a response: the connection is reset, or closed in the middle of the body; it is
# refused for now, given up by the server, or never comes. "hung" besides: from its first response
# on, a server answers nothing at all.
FAULTS = ("reset", "cut", "500", "503", "aborted", "late")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Faults:
    """Which of a server's responses fail. `planted` counts them.

    Args:
        kind: one of FAULTS.
        every: one in so many fails, the first of them too.
    """

    def __init__(self, kind: str, every: int = 1) -> None:
        self.kind, self._number, self._every, self.planted = kind, itertools.count(), every, 0

    def now(self) -> bool:
        fails = next(self._number) % self._every == 0
        self.planted += fails
        return fails


def answering(fake: FakeServer, faults: Faults | None) -> Handler:
    """Serves the fake's answers over HTTP, with faults. The first response, of the stop token's
    probe, is spared."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fails = (
            faults is not None
            and request.path == "/generate"
            and fake.version != "none"
            and faults.now()
        )
        kind = faults.kind if faults is not None and fails else None
        if kind == "reset":
            assert request.transport is not None
            request.transport.abort()
        if kind in ("500", "503"):
            return web.Response(status=int(kind), text="for now")
        if kind == "late" or (faults is not None and faults.kind == "hung" and faults.planted):
            await asyncio.Event().wait()
        status, content = await fake.request(request.method, request.path, request.headers, body)
        if kind == "aborted":
            content = content.replace(b'"type": "stop"', b'"type": "abort"')
        if kind == "cut":
            head = web.StreamResponse(headers={"Content-Length": str(len(content))})
            await head.prepare(request)
            await head.write(content[: len(content) // 2])
            assert request.transport is not None
            request.transport.close()
            return head
        return web.Response(status=status, body=content, content_type="application/json")

    return answer


def routing(urls: Sequence[str], seen: list[str]) -> Handler:
    """Hands each request to the next of several servers, and its answer back."""
    servers = itertools.cycle(urls)

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        headers = {"Authorization": request.headers.get("Authorization", "")}
        url, body = next(servers) + request.path, await request.read()
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(request.method, url, data=body, headers=headers) as told,
            ):
                return web.Response(
                    status=told.status, body=await told.read(), content_type="application/json"
                )
        except aiohttp.ClientError as error:
            return web.Response(status=502, text=str(error))

    return answer


@contextmanager
def listening(*handlers: Handler) -> Iterator[list[str]]:
    """The URLs at which they answer, on a thread with an event loop of its own."""
    loop, urls = asyncio.new_event_loop(), []
    runners: list[web.ServerRunner] = []

    async def open_all() -> None:
        for handler in handlers:
            runners.append(web.ServerRunner(web.Server(handler), shutdown_timeout=0.05))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            urls.append("http://{}:{}".format(*runners[-1].addresses[0]))

    async def close_all() -> None:
        for runner in runners:
            await runner.cleanup()
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    with ExitStack() as stack:
        stack.callback(loop.close)
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        asyncio.run_coroutine_threadsafe(open_all(), loop).result()
        stack.callback(lambda: asyncio.run_coroutine_threadsafe(close_all(), loop).result())
        yield urls
