"""One verifier process and the parent's end of its socket, and the messages that both ends send.

`rewards/verifier_pool.py` decides what to send it and when to kill it; `rewards/worker.py` is the
program it runs. A plain subprocess rather than multiprocessing: that would import the parent's
__main__ again, which is a console script, a Ray worker or pytest.

Messages are JSON, each behind its length. JSON rather than pickle: a worker runs code that is fed
what a model wrote, and nothing it sends back may be executed. Imports the standard library only,
since the worker imports it too.
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

_LENGTH = struct.Struct("!I")  # bytes of the JSON text that follows
_RECEIVE_BYTES = 1 << 16


def pack(message: Any) -> bytes:
    """One message as bytes. ASCII throughout, so that lone surrogates of a broken decode
    survive."""
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


class WorkerProcess:
    """A running worker. Nothing here blocks except `kill`, which waits for the kernel to take the
    process down.

    Args:
        verifier: as in `make_verifier`; the worker finds it along this process's sys.path.
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
                # a verifier's prints belong in the log, not among a command's results
                stdout=2,
                # a process group of its own: killed with all it started, and out of Ctrl-C's reach
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        if self._fate is not None:
            return False
        # WNOWAIT leaves an ended process in the table, so that its number is still its own when
        # `kill` uses it.
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    @property
    def sending(self) -> bool:
        """Says whether `flush` has something left to do once the socket takes more."""
        return bool(self._outgoing)

    def fileno(self) -> int:
        """The socket, for a selector."""
        return self._channel.fileno()

    def send(self, message: Any) -> None:
        """Sends what the socket takes at once; `flush` sends the rest."""
        self._outgoing += pack(message)
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket takes."""
        try:
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            # the worker is gone; `receive` reports that after its last message
            self._outgoing.clear()

    def receive(self) -> tuple[list[Any], bool]:
        """The messages that have arrived, and whether the worker has ended."""
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
        """Ends the worker and whatever it started, if they still run, and says how the worker
        ended. Repeatable."""
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
