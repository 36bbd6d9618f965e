"""How the reward pool and its workers talk: JSON messages, each behind its length. Imports the standard library only.

JSON rather than pickle: a worker runs code that is fed what a model wrote, and nothing it sends back may be executed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("!I")  # bytes of the JSON text that follows


def pack(message: Any) -> bytes:
    """One message as bytes. ASCII throughout, so that lone surrogates of a broken decode survive."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Collects the bytes of a stream, cut anywhere, back into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes."""
        self._buffer += data
        start = 0
        while len(self._buffer) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            yield json.loads(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]
