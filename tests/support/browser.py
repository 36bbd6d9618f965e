"""A headless Chromium, spoken to over the DevTools protocol: pages without a network, a pointer,
pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ANSWER_S = 60


def browser() -> str | None:
    """The program; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


# in CI a missing browser fails the tests, wherever else they are skipped, and say so
needs_browser = pytest.mark.skipif(
    browser() is None and not os.environ.get("CI"),
    reason="there is no Chromium here: apt-get install chromium",
)


class Tab:
    """One page. `requests` are the addresses that it asked for, `errors` what its scripts failed
    with."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._next()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return dict(message["result"])

    async def _next(self) -> dict[str, Any]:
        message = dict(await asyncio.wait_for(self._socket.receive_json(), ANSWER_S))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]))
        self._loaded |= message.get("method") == "Page.loadEventFired"
        return message

    async def open(self, page: Path, width: int, height: int = 1000, *, dark: bool = False) -> None:
        """Loads a file without a network at a width in pixels, and waits until its scripts have
        run."""
        for domain in ("Page", "Network", "Runtime"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._loaded = False
        await self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            await self._next()

    async def value(self, expression: str) -> Any:
        """Evaluates an expression of JavaScript; the value comes as JSON."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def settled(self, expression: str) -> Any:
        """Evaluates an expression that is a promise, once the promise is kept."""
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def point_at(self, expression: str) -> None:
        """Moves the pointer to the middle of an element, scrolled into view."""
        await self.value(f"{expression}.scrollIntoView({{block: 'center'}})")
        x, y = await self.value(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({expression}.getClientRects()[0])"
        )
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def picture(self, out: Path) -> None:
        """The whole page as PNG."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        out.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which is ended with it."""
    program = browser()
    assert program, "there is no Chromium here: apt-get install chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--remote-debugging-port=0",
        )
        process = await asyncio.create_subprocess_exec(
            program,
            *arguments,
            f"--user-data-dir={profile}",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr
            port = None
            while port is None:
                line = (await asyncio.wait_for(process.stderr.readline(), ANSWER_S)).decode()
                assert line, "the browser ended before it listened"
                port = re.search(r"DevTools listening on ws://[^:]+:(\d+)/", line)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port[1]}/json") as answer:
                    (target,) = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(
                    target["webSocketDebuggerUrl"], max_msg_size=0
                ) as socket:
                    yield Tab(socket)
        finally:
            process.terminate()
            await process.wait()
