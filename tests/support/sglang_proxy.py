"""A reverse proxy in front of a real server, which loses requests, refuses them, or is not
there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web


class Proxy:
    """A handler for support.sglang_listening.listening.

    Args:
        server: whose process (rollout.sglang.server.ServerProcess) requests go to, with its key.
    """

    def __init__(self, server: Callable[[], Any]) -> None:
        self._server, self._numbers = server, itertools.count(1)
        self.every = 0  # one request in so many is lost before the server has it; 0: none
        self.lost = 0
        self.refuses = False  # responses, with 500
        self.down = False  # and what it was asked before is not answered
        self.asked_for: list[str] = []  # requests for responses that came, by their names' ends

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.content.read()
        lost = self.every and next(self._numbers) % self.every == 0
        self.lost += bool(lost)
        if self.down or lost:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=502)
        if request.path == "/generate":
            self.asked_for.append(request.path)
            if self.refuses:
                return web.Response(status=500, text="an illegal memory access was encountered")
        process = self._server()
        headers = {"Authorization": f"Bearer {process.api_key}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method, process.url + request.path, data=body, headers=headers
            ) as told,
        ):
            answer = web.Response(
                status=told.status, body=await told.read(), content_type="application/json"
            )
        if self.down:  # since
            assert request.transport is not None
            request.transport.abort()
        return answer
