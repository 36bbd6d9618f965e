"""Keeps file descriptors open while many small parts of a few files are read, written or copied."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

from megatron_stare.errors import DataError


class OpenFiles:
    """Maps files to file descriptors. A descriptor is opened at the first access to its file. When
    the context ends, all descriptors are closed."""

    def __init__(self, flags: int) -> None:
        self._flags = flags
        self._stack = ExitStack()
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def __getitem__(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, self._flags)
            self._stack.callback(os.close, self._descriptors[file])
        return self._descriptors[file]

    def sync(self) -> None:
        """Flushes to disk the data of all files that this object has opened. Returns after the data
        is on disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)


def copy_range(source: int, start: int, target: int, to: int, nbytes: int) -> None:
    """Copies part of an open file into another open file. The copy is made inside the kernel if
    both file systems support copy_file_range.

    Raises:
        OSError: the target cannot be written.
        DataError: the source ends too early.
    """
    done = 0
    while done < nbytes:
        try:
            got = os.copy_file_range(source, target, nbytes - done, start + done, to + done)
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
            got = os.pwrite(
                target, os.pread(source, min(nbytes - done, _PIECE), start + done), to + done
            )
        if got == 0:
            raise DataError(
                "a file of the source became shorter while it was read",
                fix="leave it alone and convert again",
            )
        done += got


# errors if the two file systems differ, or if one does not support the copy
_CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_PIECE = 8 << 20
