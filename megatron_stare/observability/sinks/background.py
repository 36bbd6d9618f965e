"""Calls that may hang or fail, made in order on a thread of their own, so that training never waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """A thread with a bounded queue of calls.

    Its errors are raised by the next `call`, for whoever asked to tell. A daemon: a call that hangs does not keep the
    process.

    Args:
        name: of the thread.
        room: calls that may wait; further ones are refused.
    """

    def __init__(self, name: str, room: int = 1000) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(room)
        self._error: Exception | None = None
        self.closing = threading.Event()  # what waits between attempts waits for this
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Has it called after those before it.

        Raises:
            Exception: what an earlier call raised.
            RuntimeError: too many wait already, and this one is left out.
        """
        try:
            self._calls.put_nowait(function)
        except queue.Full:
            raise RuntimeError(f"{self._calls.maxsize} reports wait for it, and further ones are left out") from None
        if error := self._error:
            self._error = None
            raise error

    def close(self, limit_s: float) -> bool:
        """Waits until all calls are made, `limit_s` seconds at most. Returns whether they are.

        Raises:
            Exception: what the last of them raised.
        """
        self.closing.set()
        try:
            self._calls.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(limit_s)
        if error := self._error:
            self._error = None
            raise error
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                function()
            except Exception as error:  # whatever a service's library raises
                self._error = error
