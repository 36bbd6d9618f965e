"""Writes down which lines of the package a test reaches, in every process that it starts.

MUTATION_LINES names a folder: `test` holds the number of the test that runs, four bytes that all processes map;
`reached` gets a row `test file line` as soon as a test reaches a line, since a rank may be killed at any moment.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

FOLLOWED = ("/megatron_stare/",)


def begin(folder: Path) -> memoryview:
    """Makes the folder's files; the number of the running test is to be put into what is given back."""
    (folder / "test").write_bytes(b"\0" * 4)
    (folder / "reached").touch()
    os.environ["MUTATION_LINES"] = str(folder)
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent / 'probe'}:{os.environ.get('PYTHONPATH', '')}"
    return _number(folder)


def follow() -> None:
    """Follows the lines of this process and of those it forks."""
    folder = Path(os.environ["MUTATION_LINES"])
    number, seen, names = _number(folder), set[tuple[int, str, int]](), dict[str, str]()
    rows = os.open(folder / "reached", os.O_WRONLY | os.O_APPEND)

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        here = number[0], frame.f_code.co_filename, frame.f_lineno
        if here not in seen:
            seen.add(here)
            os.write(rows, f"{here[0]} {names[here[1]]} {here[2]}\n".encode())
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in names:
            package = next((file.index(name) for name in FOLLOWED if name in file), None)
            names[file] = "" if package is None else file[package + 1 :]
        return at_line if names[file] else None

    threading.settrace(at_call)
    sys.settrace(at_call)


def read(folder: Path) -> dict[int, dict[str, set[int]]]:
    """The lines that each test reached, by file."""
    found: dict[int, dict[str, set[int]]] = {}
    for row in (folder / "reached").read_text().splitlines():
        number, name, line = row.split()
        found.setdefault(int(number), {}).setdefault(name, set()).add(int(line))
    return found


def _number(folder: Path) -> memoryview:
    with (folder / "test").open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 4)).cast("i")
