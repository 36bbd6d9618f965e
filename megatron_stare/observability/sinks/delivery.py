"""Delivers reports of a run to a service without delaying training.

`Background` runs the calls to the service in order, on a separate thread, because a call may hang
or fail. `Delivered` is a small file in the run directory that lists what the service has received.
Subclasses of `Service` write the `Delivered` file before they send a step. If the run is killed
after it has written the `Delivered` file and before it sends the step, the service never receives
this step. The service never receives a step twice. The webhook sink uses the opposite order: it
posts the alerts of a step first, and writes its `Delivered` file afterwards. If the run is killed
between the posts and the write, the service may receive the same alerts twice. `Delivered` files
are not part of checkpoints. When a run goes back to a checkpoint, the service still has all data
that was sent after this checkpoint.
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
    """A thread with a bounded queue of function calls.

    If a queued call fails, the next use of `call` raises the error, so that the caller can report
    the error. The thread is a daemon thread, so a hanging call does not keep the process alive.

    Args:
        name: name of the thread.
        room: number of calls that may wait in the queue. Further calls are refused.
    """

    def __init__(self, name: str, room: int = 1000) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(room)
        self._error: Exception | None = None
        self.closing = threading.Event()  # interrupts waits between attempts
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Queues a call.

        Raises:
            Exception: the error of an earlier call.
            RuntimeError: the queue is full; this call is dropped.
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
        """Waits at most `limit_s` seconds for the queued calls. Returns True if all queued calls
        were made within this limit. Returns False without waiting if the queue is full.

        Raises:
            Exception: the error of a queued call, if `call` has not raised this error already.
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
            except Exception as error:  # any error of a service's library
                self._error = error


@dataclass
class Delivered:
    """Records what a service has received.

    `id`: the run's name in the service, a random name by default.
    `starts`: number of times that the sink has opened the run in the service: once when the run
        starts, and once each time the run resumes.
    `step`: the newest step that was sent.
    `evaluated`: one pair [step, task] for every evaluation that was sent.
    `redone`: ranges [first step, last step] of steps that the run repeated after a resume. The
        service keeps the metrics that the run sent for these steps before the resume. The run does
        not send the metrics of a repeated step.
    `alerts`: one list of three items for each of the webhook's newest 1,000 posts, oldest post
        first. The items are the name of the alert, a bool, and the last step of the alert. The bool
        is False if the post announced the beginning of the alert, and True if the post announced
        the end of the alert.
    `dir`: absolute path of the directory of the run that wrote the file; "" in files of old
        releases.
    """

    file: Path
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    starts: int = 0
    step: int = 0
    evaluated: list[list[int | str]] = field(default_factory=list)
    redone: list[list[int]] = field(default_factory=list)
    alerts: list[list[str | bool | int]] = field(default_factory=list)
    dir: str = ""

    @classmethod
    def read(cls, file: Path) -> Delivered:
        """Reads the file. Returns a `Delivered` without deliveries if the file does not exist. Also
        returns a `Delivered` without deliveries if the file was copied from the directory of
        another run, because a copied file lists what the service has received from that other run.

        Raises:
            DataError: the file is damaged.
        """
        try:
            told = cls(file, **json.loads(file.read_text()))
        except FileNotFoundError:
            return cls(file)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"not a record of deliveries to a service: {error}",
                where=str(file),
                fix="remove it: the service then gets the whole run again, under another name",
            ) from error
        return cls(file) if told._is_copy() else told

    def _is_copy(self) -> bool:
        """Returns True if the file was copied from the directory of another run. The field `dir`
        names the directory in which the file was written. If the file is still in `dir`, the file
        is not a copy. If the file is now in another directory, the function looks in `dir` for a
        file with the same name and the same `id`. If `dir` contains such a file, this file is the
        original, and the file in the other directory is a copy. If `dir` contains no such file, the
        whole run directory was moved, and the file is not a copy. The two directories are compared
        with `os.path.samefile`, because one run directory may have several paths, for example on
        several nodes."""
        try:
            original = Path(self.dir) / self.file.name
            return (
                bool(self.dir)
                and not os.path.samefile(self.dir, self.file.parent)
                and json.loads(original.read_text())["id"] == self.id
            )
        except (OSError, ValueError, TypeError, LookupError):
            return False

    def write(self) -> None:
        """Writes the file. Raises OSError."""
        self.dir = str(self.file.parent.absolute())
        told = {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if each.name != "file"
        }
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(told))
        os.replace(temporary, self.file)

    def goes_on_after(self, step: int) -> None:
        """Records that the run resumes after `step`. Steps after `step` that were already delivered
        are added to `redone`, because the run repeats these steps."""
        if step < self.step and [step + 1, self.step] not in self.redone:
            self.redone.append([step + 1, self.step])
