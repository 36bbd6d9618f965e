"""File descriptors that stay open while many small parts of few files are read or written."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path


class OpenFiles:
    """Descriptors by file, opened when first asked for. A context manager that closes them."""

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
        """What was written is on disk when this returns."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)
