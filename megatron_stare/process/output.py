"""Writes the output of a run's workers to files in the run directory.

Ray keeps its own output files in each node's /tmp, and these files vanish with the node. The driver
therefore chooses a folder in the run directory, and passes the path of this folder to the workers
in an environment variable. Every rank and engine that Ray hosts appends its stdout and stderr to
its own file in this folder. Every server of an engine has a file of its own in this folder, next to
the engine's file. A running server writes its log to a temporary file outside this folder. When an
engine closes its server, the engine appends the end of the temporary log, at most TAIL_BYTES bytes,
to the server's file in the run directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = "MEGATRON_STARE_OUTPUT"  # environment variable with the folder, for workers
TAIL_BYTES = 200_000  # of a server's log, at each of its ends


@contextlib.contextmanager
def kept_output(folder: Path) -> Iterator[None]:
    """Makes every worker that starts inside this context append its output to a file in
    `folder`."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder.resolve())
    try:
        yield
    finally:
        os.environ.pop(FOLDER)
        if before is not None:
            os.environ[FOLDER] = before


def carried_output() -> dict[str, str]:
    """Returns the environment variable for the output folder, as a dict of name and value. Returns
    {} if the variable is not set."""
    return {FOLDER: os.environ[FOLDER]} if FOLDER in os.environ else {}


def keep_own_output(role: str) -> Path | None:
    """Appends stdout and stderr of this process to a file. Child processes also write to this file,
    because they inherit stdout and stderr.

    Args:
        role: determines the name of the file. For example, the file of "training ranks 3" is
            training_ranks_3.log.

    Returns:
        The path of the file. The path is None if there is no output folder, or if this node cannot
            write to the folder. stdout and stderr are then unchanged.
    """
    file = _file(role)
    if file is None:
        return None
    try:
        with file.open("ab", buffering=0) as log:
            host, when = os.uname().nodename, time.strftime("%Y-%m-%d %H:%M:%S")
            log.write(f"--- {role}: process {os.getpid()} on {host}, {when}\n".encode())
            for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
                stream.flush()
                os.dup2(log.fileno(), number)
    except OSError:
        return None
    return file


def leave_tail(role: str, said: str) -> None:
    """Appends the end of a server's log, at most TAIL_BYTES bytes, to the server's output file.
    Does nothing if there is no output folder.

    Args:
        role: name of the server, from which the name of the output file is made.
        said: the server's log.
    """
    if (file := _file(role)) is not None:
        with contextlib.suppress(OSError), file.open("ab") as log:
            log.write(said.encode(errors="replace")[-TAIL_BYTES:])


def _file(role: str) -> Path | None:
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    with contextlib.suppress(OSError):
        Path(folder).mkdir(exist_ok=True)
        return Path(folder) / f"{re.sub(r'[^a-z0-9]+', '_', role.lower()).strip('_')}.log"
    return None
