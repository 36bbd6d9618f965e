"""Manages one verifier process and the parent's end of the socket between parent and process.
Defines the message format of both ends.

`rewards/verifier_pool.py` decides which messages to send to the process and when to kill the
process. The process runs `rewards/worker.py`. The verifier process is a plain subprocess, because
multiprocessing would import the parent's __main__ module again. The parent's __main__ module may be
a console script, a Ray worker or pytest.

Messages are JSON with a length prefix. A worker processes text that a model wrote, so the parent
must not execute anything that a worker sends back. The messages are therefore not pickled. This
module imports only the standard library and `registry`, because the worker imports this module too.
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
    """Serializes one message as ASCII JSON text. A decoding error may leave a lone surrogate in a
    text. UTF-8 cannot encode a lone surrogate, but ASCII JSON contains it as an escape sequence."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Reassembles messages from chunks of a stream. A chunk may end in the middle of a message."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that `data` completes."""
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
    """A running worker process. `kill` is the only method that blocks. `kill` returns once the
    kernel has ended the process.

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
        """Returns True if data is left that `flush` must send once the socket is writable."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for a selector."""
        return self._channel.fileno()

    def send(self, message: Any) -> None:
        """Sends as much of the message as the socket accepts at once. `flush` sends the rest."""
        self._outgoing += pack(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much of the remaining data as the socket accepts."""
        try:
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            # the worker is gone; `receive` reports that after its last message
            self._outgoing.clear()

    def receive(self) -> tuple[list[Any], bool]:
        """Returns the messages that have arrived, and True if the worker has ended."""
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
        """Kills the worker and the worker's children if any of these processes still runs. Returns
        a text that says how the worker ended. Idempotent."""
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
