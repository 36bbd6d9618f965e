"""What a folder can do: written, renamed, locked, and how fast. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WRITTEN = 32 * 2**20  # bytes
_SECOND_LOCK = (
    "import fcntl, sys\n"
    "file = open(sys.argv[1], 'w')\n"
    "try:\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    "except OSError:\n    sys.exit(1)"
)


@dataclass(frozen=True)
class FolderSeen:
    """renames: a folder under another name is there at once; locks: a lock that one process holds no other gets;
    mb_s: 10^6 bytes a second, written and synced. error: why nothing could be tried."""

    path: str
    renames: bool = False
    locks: bool = False
    mb_s: float = 0.0
    error: str = ""


def look_at_folder(path: Path) -> FolderSeen:
    """Tries a folder, or the nearest one above it that there is."""
    there = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".doctor-", dir=there))
    except OSError as error:
        return FolderSeen(str(there), error=f"cannot be written: {error.strerror}")
    try:
        return FolderSeen(str(there), _renames(scratch), _locks(scratch), _speed(scratch))
    except OSError as error:
        return FolderSeen(str(there), error=f"cannot be written: {error.strerror}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def marker(path: Path) -> Iterator[Path | None]:
    """A file in the folder, for other nodes to look for; None where it cannot be written."""
    there = next(each for each in (path, *path.absolute().parents) if each.is_dir())
    try:
        handle, name = tempfile.mkstemp(prefix=".doctor-", dir=there)
    except OSError:
        yield None
        return
    os.close(handle)
    try:
        yield Path(name).absolute()
    finally:
        Path(name).unlink(missing_ok=True)


def _renames(scratch: Path) -> bool:
    before, after = scratch / "step.tmp", scratch / "step"
    before.mkdir()
    (before / "file").write_text("whole")
    before.rename(after)
    return (after / "file").read_text() == "whole" and not before.exists()


def _locks(scratch: Path) -> bool:
    with (scratch / ".lock").open("w") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        command = [sys.executable, "-c", _SECOND_LOCK, str(scratch / ".lock")]
        return subprocess.run(command, check=False).returncode == 1


def _speed(scratch: Path) -> float:
    block = os.urandom(2**20)
    began = time.perf_counter()
    with (scratch / "file").open("wb") as file:
        for _ in range(WRITTEN // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return WRITTEN / 1e6 / (time.perf_counter() - began)
