"""Starts, controls and kills one verifier process, and exchanges messages with it over a socket.
Defines the format of the messages in both directions.

`rewards/verifier_pool.py` decides which messages are sent to a verifier process and when the
process is killed. The verifier process runs `rewards/worker.py`. The verifier process is started
with `subprocess`. The module `multiprocessing` is not used, because `multiprocessing` would import
the parent's __main__ module again. The parent's __main__ module may be a console script, a Ray
worker or pytest.

Each message is JSON with a length prefix. Messages are not pickled, because reading a pickle can
execute code, and a worker handles text that a model wrote. This module imports only the standard
library and `registry`, because every worker imports this module too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from megatron_stare.registry import Extension

_LENGTH = struct.Struct("!I")  # length of the following JSON text in bytes
_RECEIVE_BYTES = 1 << 16


def pack(message: Any) -> bytes:
    """Serializes one message as a length prefix and JSON text in ASCII. A decoded text can contain
    a lone surrogate, which is one half of a UTF-16 pair without the other half. UTF-8 cannot encode
    a lone surrogate, but JSON in ASCII writes a lone surrogate as an escape sequence."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Reassembles messages from the chunks of a byte stream. A chunk can end in the middle of a
    message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Adds `data` to the stream, and yields every message that `data` completes."""
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


class WorkerProcess:
    """A running worker process. No method blocks except `kill`, which waits until the process has
    ended.

    Args:
        verifier: as in `make_verifier`. The worker imports the verifier through the sys.path of the
            parent process.
    """

    def __init__(self, verifier: Extension) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        self._incoming = Unpacker()
        self._outgoing = bytearray()
        self._fate: str | None = None
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "megatron_stare.rewards.worker",
                    str(verifier),
                    str(theirs.fileno()),
                ],
                pass_fds=(theirs.fileno(),),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                },
                stdin=subprocess.DEVNULL,
                # a verifier's prints go to the log, not to the standard output of a command
                stdout=2,
                # its own process group, which is killed together with its children and does not
                # receive Ctrl-C
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        if self._fate is not None:
            return False
        # WNOWAIT leaves an ended process in the table, so that its number is not reused before
        # `kill` uses it.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    @property
    def sending(self) -> bool:
        """Returns True if some data is not sent yet. If `sending` is True, the caller must call
        `flush` as soon as the socket is writable."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Returns the socket's file descriptor, so that a selector can watch the socket."""
        return self._channel.fileno()

    def send(self, message: Any) -> None:
        """Sends as much of the message as the socket accepts without blocking. `flush` sends the
        rest."""
        self._outgoing += pack(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much of the unsent data as the socket accepts without blocking."""
        try:
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            # the worker is gone; `receive` reports that after its last message
            self._outgoing.clear()

    def receive(self) -> tuple[list[Any], bool]:
        """Returns the messages that have arrived since the previous call, and whether the worker
        has ended."""
        messages: list[Any] = []
        try:
            while data := self._channel.recv(_RECEIVE_BYTES):
                messages.extend(self._incoming.feed(data))
        except BlockingIOError:
            return messages, False
        except ConnectionError:
            pass
        return messages, True

    def kill(self) -> str:
        """Kills the worker and all processes in the worker's process group, if they still run.
        Returns a text that states how the worker ended. Idempotent."""
        if self._fate is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._process.wait()
            self._channel.close()
            self._fate = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
        return self._fate
