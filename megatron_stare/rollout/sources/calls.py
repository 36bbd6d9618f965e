"""Records the tool calls of environments in a journal. The journal records the request of a tool
call before the call, and the answer after the call.

The environment of a response runs again if the response is cut at the end of a step and continued
later, or if a resumed run repeats the response. An environment that runs again receives the earlier
answers of its tools from this journal. The journal therefore ensures that no tool call takes effect
twice and that no tool's answer changes.

The journal consists of files, one file for each training step. All calls of a response are recorded
in the file of the step in which the response began, even if a later step continues the response. An
environment continues only after its new line in the journal is on disk. After driver/checkpoints.py
has removed old checkpoints, driver/checkpoints.py also removes every journal file that the
remaining checkpoints do not need.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.errors import DataError, UserError
from megatron_stare.weights.files.staging import sync_entry

CALLS = "calls"  # folder of the journal in the run directory


def forget_calls(folder: Path, before: int) -> None:
    """Removes the journal file of every step whose number is less than the argument `before`. A
    file that cannot be removed stays, and no error is raised."""
    for file in folder.glob("step_*.jsonl"):
        number = file.stem.removeprefix("step_")
        if number.isdigit() and int(number) < before:
            with contextlib.suppress(OSError):
                file.unlink()


class ResponseKey(NamedTuple):
    """Identifies a response by its prompt, its sample, and the step in which the response began.
    The step in which a response began also determines the sampling noise of the response."""

    step: int
    cursor: int
    sample: int


@dataclass
class Call:
    """A tool call and its outcome.

    `outcome`: {"answer": JSON} or {"error": text}. `outcome` is None while the outcome of the call
        is unknown.
    """

    id: str
    outcome: Mapping[str, Any] | None = None


class CallJournal:
    """Journal of the tool calls of unfinished responses.

    Args:
        folder: folder of the journal's files. The files remain when the process ends. If `folder`
            is None, the journal is kept in memory only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._steps: dict[int, dict[ResponseKey, dict[tuple[int, str], Call]]] = {}
        self._waiting: list[tuple[Path, bytes, Future[None]]] = []
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "calls")

    def find(self, response: ResponseKey, number: int, asked: str) -> Call | None:
        """Returns the response's recorded call with index `number` and request `asked`, or None if
        the response never began this call. Raises DataError if the journal's file is damaged."""
        return self._of(response.step).get(response, {}).get((number, asked))

    async def begin(self, response: ResponseKey, number: int, asked: str, call: str) -> Call:
        """Records a call that is about to be made. Waits until the record is on disk.

        Args:
            asked: the tool's name and the request, as JSON.
            call: id of the call.

        Raises:
            UserError: the record cannot be written, and the caller must therefore not make the
                call.
        """
        begun = Call(call)
        where = {"cursor": response.cursor, "sample": response.sample, "call": number}
        await self._append(response.step, {"id": begun.id, **where, "asked": asked})
        self._of(response.step).setdefault(response, {})[number, asked] = begun
        return begun

    async def end(self, response: ResponseKey, call: Call, outcome: Mapping[str, Any]) -> None:
        """Records the outcome of a call. Waits until the record is on disk. Raises UserError if the
        record cannot be written."""
        await self._append(response.step, {"id": call.id, **outcome})
        call.outcome = outcome

    async def take_back(self, response: ResponseKey, call: Call) -> None:
        """Marks the outcome of a call as unknown again. Waits until the record is on disk."""
        await self._append(response.step, {"id": call.id, "taken_back": True})
        call.outcome = None

    def forget(self, response: ResponseKey) -> None:
        """Drops the calls of a finished response from memory. The calls remain in the journal's
        files for a run that resumes from an earlier step."""
        self._of(response.step).pop(response, None)

    def _of(self, step: int) -> dict[ResponseKey, dict[tuple[int, str], Call]]:
        if step not in self._steps:
            self._steps[step] = (
                {} if self._folder is None else _read(_file(self._folder, step), step)
            )
        return self._steps[step]

    async def _append(self, step: int, line: Mapping[str, Any]) -> None:
        if self._folder is None:
            return
        written: Future[None] = Future()
        with self._lock:
            self._waiting.append(
                (_file(self._folder, step), f"{json.dumps(line)}\n".encode(), written)
            )
        self._writer.submit(self._write_waiting)
        await asyncio.wrap_future(written)

    def _write_waiting(self) -> None:
        """Writes all waiting lines. The lines of a file share one fsync, so that a slow disk does
        not limit the number of calls per second."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        files: dict[Path, list[tuple[bytes, Future[None]]]] = {}
        for file, line, written in waiting:
            if written.set_running_or_notify_cancel():
                files.setdefault(file, []).append((line, written))
        for file, lines in files.items():
            try:
                _write(file, b"".join(line for line, _ in lines))
            except BaseException as error:
                for _, written in lines:
                    written.set_exception(error)
            else:
                for _, written in lines:
                    written.set_result(None)


def _write(file: Path, lines: bytes) -> None:
    try:
        new = not file.exists()
        file.parent.mkdir(exist_ok=True)
        with file.open("ab", buffering=0) as out:
            if out.write(lines) != len(lines):
                raise OSError("no room for a whole line")
            os.fsync(out.fileno())
        if new:
            sync_entry(file.parent)
    except OSError as error:
        raise UserError(
            f"a call of the environment cannot be journalled: {error}",
            where=str(file),
            fix="make room there, and continue the run with --resume",
        ) from error


def _file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def _read(file: Path, step: int) -> dict[ResponseKey, dict[tuple[int, str], Call]]:
    """Reads the tool calls that a journal file records. Removes the last line of the file if a
    killed process left the line incomplete."""
    found: dict[ResponseKey, dict[tuple[int, str], Call]] = {}
    if not file.exists():
        return found
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(file, len(whole))
    by_id: dict[str, Call] = {}
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
            call = by_id.setdefault(line["id"], Call(line["id"]))
            if "asked" in line:
                found.setdefault(ResponseKey(step, line["cursor"], line["sample"]), {})[
                    line["call"], line["asked"]
                ] = call
            else:
                call.outcome = (
                    None
                    if "taken_back" in line
                    else {k: line[k] for k in line if k in ("answer", "error")}
                )
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"not a line of the journal of calls: {error}",
                where=f"{file}:{number}",
                fix="delete the line; its call then counts as not answered",
            ) from error
    return found
