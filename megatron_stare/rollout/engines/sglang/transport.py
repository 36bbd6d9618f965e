"""HTTP to one SGLang server, by aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

# Idle connections are not used for longer than this, seconds: a server closes them after five, and
# a request that meets the closing is lost.
KEPT_S = 2.0


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


def on_loopback(url: str) -> bool:
    """Returns True if only this machine's programs can reach a URL."""
    return urlsplit(url).hostname in LOOPBACK_NAMES


class TransportError(OSError):
    """The connection broke, or what came over it is not HTTP."""


class Transport(Protocol):
    """Takes requests to one server."""

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """Status and content of the answer. Raises OSError where there is none."""

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP client with as many connections as requests are under way, kept for the next ones.

    Belongs to the event loop that first uses it.

    Args:
        url: http or https, without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """See Transport. Cancelled, it closes its connection: the answer must not be taken for
        another's."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the caller's
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
