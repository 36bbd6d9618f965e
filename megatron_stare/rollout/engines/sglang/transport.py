"""Sends HTTP requests to one SGLang server, through aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

# Lifetime of idle connections, seconds. A server closes them after five, and a request sent at that
# moment is lost.
KEPT_S = 2.0


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def on_loopback(url: str) -> bool:
    """Returns True if a URL can be reached only from this machine."""
    return urlsplit(url).hostname in LOOPBACK_NAMES


class TransportError(OSError):
    """Raised if the connection breaks, or if the answer is not HTTP."""


class Transport(Protocol):
    """Sends requests to one server."""

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """Returns the HTTP status and the content of the answer. Raises OSError if no answer
        arrives."""

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP client with one connection per request in flight. Idle connections are reused.

    The client can be used only in the event loop in which it was first used.

    Args:
        url: URL with http or https, without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """See Transport. Cancelling the call closes the connection, so that a late answer is not
        read as the answer to another request."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # callers set limits
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:
            raise TransportError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
