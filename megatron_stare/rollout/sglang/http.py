"""HTTP/1.1 over asyncio's streams, as much of it as SGLang's servers speak.

A rollout is thousands of requests beside a server that needs every core there is. A general client library took 2.6 ms
of processor time a request, this takes 0.3 (benchmarks/rollout_throughput.py holds the engine against a bare client).
"""

from __future__ import annotations

import asyncio
import select
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

# Idle connections are not used for longer than this, seconds: a server closes them after five, and a request that meets
# the closing is lost.
KEPT_S = 2.0
_LINE_LIMIT = 2**16  # bytes of a header line


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
    """Connections to one server, kept for the next request; as many as requests are under way.

    Args:
        url: http or https, without a path.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._name = parts.netloc.rpartition("@")[2]
        self._idle: list[tuple[float, StreamReader, StreamWriter]] = []  # since when

    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[int, bytes]:
        """See Transport. Cancelled, it closes its connection: the answer must not be taken for another's."""
        reader, writer = await self._connection()
        try:
            lines = [f"{method} {path} HTTP/1.1", f"Host: {self._name}", f"Content-Length: {len(body or b'')}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
            await writer.drain()
            status, content, kept = await _answer(reader)
        except BaseException as error:
            writer.close()
            if isinstance(error, EOFError | ValueError | asyncio.LimitOverrunError):
                raise TransportError(f"the answer is cut short or no HTTP: {error}") from error
            raise
        if kept:
            self._idle.append((time.monotonic(), reader, writer))
        else:
            writer.close()
        return status, content

    async def _connection(self) -> tuple[StreamReader, StreamWriter]:
        while self._idle:
            since, reader, writer = self._idle.pop()
            if time.monotonic() - since < KEPT_S and not _readable(writer):
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls or None, limit=_LINE_LIMIT)

    async def close(self) -> None:
        while self._idle:
            _, _, writer = self._idle.pop()
            writer.close()


def _readable(writer: StreamWriter) -> bool:
    """Whether something came over an idle connection; nothing but its end does."""
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), select.POLLIN)
    return writer.is_closing() or bool(poll.poll(0))


async def _answer(reader: StreamReader) -> tuple[int, bytes, bool]:
    """Status, content, and whether the connection may be used again."""
    version, status, *_ = (await reader.readuntil(b"\r\n")).split(maxsplit=2)
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"{version[:20]!r} is no version of HTTP/1")
    headers: dict[bytes, bytes] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip().lower()
    kept = headers.get(b"connection") != b"close"
    if headers.get(b"transfer-encoding") == b"chunked":
        return int(status), await _chunks(reader), kept
    if b"content-length" not in headers:
        return int(status), await reader.read(), False
    return int(status), await reader.readexactly(int(headers[b"content-length"])), kept


async def _chunks(reader: StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":
        pass  # trailers
    return b"".join(parts)
