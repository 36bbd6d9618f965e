"""Stacks of Python processes, taken from outside by py-spy (github.com/benfred/py-spy), which reads their memory: a
process that is stopped, or whose interpreter is held, cannot say where it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PAUSING_S, READING_S = 8.0, 6.0  # until a look is given up
OTHERS = ("/lib/python", "/site-packages/", "/dist-packages/", "<")  # on the path of what somebody else wrote
OURS = "/megatron_stare/"
PAUSED = ("T", "t", "D")  # asked to pause, one of these would never say that it has


@dataclass(frozen=True)
class Frame:
    """A Python function on a stack.

    own: it is neither Python's nor an installed package's, but this project's or a user's.
    """

    function: str
    file: str
    line: int
    own: bool = False

    @property
    def name(self) -> str:
        """The function's, without its class's."""
        return self.function.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """One of a process. frames: the innermost first."""

    name: str
    frames: tuple[Frame, ...]
    holds_interpreter: bool = False


def program() -> str | None:
    """py-spy's path: of this environment, or else of the shell."""
    here = Path(sys.executable).with_name("py-spy")
    return str(here) if here.exists() else shutil.which("py-spy")


def take(pid: int, state: str, stuck: bool = False) -> tuple[list[Thread], str]:
    """The threads of a process, and in words what could not be had of them, "" where nothing is missing.

    The process is paused for the look, some milliseconds; one that cannot be paused, or not by us, is read as it runs.

    Args:
        stuck: it waits for a file system, and would not pause.
    """
    spy = program()
    if spy is None:
        return [], "py-spy is not installed"
    said = ""
    for flags, limit in (((), PAUSING_S), (("--nonblocking",), READING_S), (("--nonblocking",), READING_S)):
        if not flags and (stuck or state in PAUSED):
            continue
        try:
            done = subprocess.run(
                [spy, "dump", "--json", "--pid", str(pid), *flags],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=limit,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said = f"py-spy: {type(error).__name__} after {limit:g} s"
            continue
        try:
            threads = parsed(done.stdout)
        except (ValueError, LookupError, TypeError):
            threads = []
        if threads:
            return threads, "read while it ran, and may be of two moments" if flags and not stuck and said else ""
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0] or "py-spy found no thread"
    return [], f"no stack: {said}"


def parsed(content: bytes) -> list[Thread]:
    """What `py-spy dump --json` writes. Raises ValueError, LookupError or TypeError where it is something else."""
    return [
        Thread(
            str(each["thread_name"] or each["thread_id"]),
            tuple(
                Frame(f["name"], f["short_filename"] or f["filename"], int(f["line"]), _own(f["filename"]))
                for f in each["frames"]
            ),
            bool(each["owns_gil"]),
        )
        for each in json.loads(content)
    ]


def _own(file: str) -> bool:
    return OURS in file or not any(part in file for part in OTHERS)
