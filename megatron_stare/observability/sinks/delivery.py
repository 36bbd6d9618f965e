"""Delivers what a run reports to a service: without training waiting for it, and nothing twice.

`Background` makes calls that may hang or fail, in order, on a thread of their own. What a service
has been given of a run stands in a small file of the run directory (`Delivered`), written before a
step is handed over. Where a run is killed in between, the service may lack that step; it never has
one twice. A checkpoint does not hold it: going back to one takes nothing back from a service.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron_stare.errors import DataError


class Background:
    """A thread with a bounded queue of calls.

    Its errors are raised by the next `call`, for whoever asked to tell. A daemon: a call that hangs
    does not keep the process.

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
            raise RuntimeError(
                f"{self._calls.maxsize} reports wait for the service, and further reports are"
                " dropped"
            ) from None
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


@dataclass
class Delivered:
    """id: the run's name in the service, made here. starts: how often the run was opened there.

    step: the newest that was handed over. evaluated: [step, task] of evaluations that were.
    redone: [first, last] of steps that were made again after that, and whose first figures the
    service has.
    """

    file: Path
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    starts: int = 0
    step: int = 0
    evaluated: list[list[int | str]] = field(default_factory=list)
    redone: list[list[int]] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Delivered:
        """Reads what was delivered; nothing was where there is no file.

        Raises:
            DataError: it is damaged.
        """
        try:
            return cls(file, **json.loads(file.read_text()))
        except FileNotFoundError:
            return cls(file)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"not a record of deliveries to a service: {error}",
                where=str(file),
                fix="remove it: the service then gets the whole run again, under another name",
            ) from error

    def write(self) -> None:
        """Raises OSError."""
        told = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name != "file"
        }
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(told))
        os.replace(temporary, self.file)

    def goes_on_after(self, step: int) -> None:
        """The run is continued after this step: later ones that were delivered are made again."""
        if step < self.step and [step + 1, self.step] not in self.redone:
            self.redone.append([step + 1, self.step])
