"""A worker that waits, or fails as a rank does whose peer is gone."""

from __future__ import annotations

import os
import threading


class WaitingWorker:
    def wait(self) -> None:
        threading.Event().wait()

    def fail(self) -> None:
        raise RuntimeError("connection closed by peer")

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None: ...
