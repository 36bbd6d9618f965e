"""Journal of the calls that environments make to the world outside: the intent before a call, its
answer after it.

A response that is cut, or made again by a run that is resumed, has its environment run again. What
its tools answered before is read here, so that no call acts twice and no tool can answer otherwise.
Calls of a response lie in the file of the step it was begun in, each line on disk before what
follows it is done.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.errors import DataError, UserError
from megatron_stare.weights.files.staging import sync_entry

CALLS = "calls"  # the journal's folder, in a run's directory


class ResponseKey(NamedTuple):
    """Which response: that of a sample of a prompt, begun in a step, which keys its sampling
    noise."""

    step: int
    cursor: int
    sample: int


@dataclass
class Call:
    """A call, and what became of it.

    outcome: {"answer": JSON} or {"error": text}; None: it was begun, and nobody knows.
    """

    id: str
    outcome: Mapping[str, Any] | None = None


class CallJournal:
    """Calls of the responses that are being made.

    Args:
        folder: of the journal's files, which outlive the process; None: it is kept in memory alone.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._steps: dict[int, dict[ResponseKey, dict[tuple[int, str], Call]]] = {}
        self._writing = threading.Lock()

    def find(self, response: ResponseKey, number: int, asked: str) -> Call | None:
        """The call of this number and request, where it was begun. Raises DataError where its file
        is damaged."""
        return self._of(response.step).get(response, {}).get((number, asked))

    async def begin(self, response: ResponseKey, number: int, asked: str, call: str) -> Call:
        """Notes a call that is about to be made. Waits until that is on disk.

        Args:
            asked: name of the tool and request, as JSON.
            call: its id.

        Raises:
            UserError: it cannot be written; then the call must not be made.
        """
        begun = Call(call)
        where = {"cursor": response.cursor, "sample": response.sample, "call": number}
        await self._append(response.step, {"id": begun.id, **where, "asked": asked})
        self._of(response.step).setdefault(response, {})[number, asked] = begun
        return begun

    async def end(self, response: ResponseKey, call: Call, outcome: Mapping[str, Any]) -> None:
        """Notes what became of it. Waits until that is on disk. Raises UserError where it cannot be
        written."""
        await self._append(response.step, {"id": call.id, **outcome})
        call.outcome = outcome

    async def take_back(self, response: ResponseKey, call: Call) -> None:
        """Nobody knows what became of a call after all. Waits until that is on disk."""
        await self._append(response.step, {"id": call.id, "taken_back": True})
        call.outcome = None

    def forget(self, response: ResponseKey) -> None:
        """Lets go of the calls of a response that is whole; the files keep them, for a run that
        goes back."""
        self._of(response.step).pop(response, None)

    def _of(self, step: int) -> dict[ResponseKey, dict[tuple[int, str], Call]]:
        if step not in self._steps:
            self._steps[step] = (
                {} if self._folder is None else _read(_file(self._folder, step), step)
            )
        return self._steps[step]

    async def _append(self, step: int, line: Mapping[str, Any]) -> None:
        if self._folder is not None:
            await asyncio.to_thread(self._write, _file(self._folder, step), json.dumps(line))

    def _write(self, file: Path, line: str) -> None:
        try:
            with self._writing:
                new = not file.exists()
                file.parent.mkdir(exist_ok=True)
                with file.open("ab", buffering=0) as out:
                    whole = f"{line}\n".encode()
                    if out.write(whole) != len(whole):
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
    """The calls of a file; what was being written when a process was killed is cut off."""
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
