"""This project's own files, as a source of names: the package, and the folders of scripts beside it."""

from __future__ import annotations

import functools
from functools import cached_property
from pathlib import Path

PACKAGE = "megatron_stare"
FOLDERS = ("tools", "tests", "benchmarks")  # whose modules find each other from there


class OwnSource:
    """The Python files of a checkout, and further ones.

    Args:
        root: of the checkout.
        more: files that count as if they were the project's.
    """

    def __init__(self, root: Path, more: tuple[Path, ...] = ()) -> None:
        self.root, self._more = root, more

    @cached_property
    def paths(self) -> dict[str, Path]:
        """By the path that a module is imported by."""
        found = {file.relative_to(self.root).as_posix(): file for file in sorted((self.root / PACKAGE).rglob("*.py"))}
        for folder in FOLDERS:
            for file in sorted((self.root / folder).rglob("*.py")):
                path = file.relative_to(self.root / folder).as_posix()
                if not path.startswith("upstream/") and "check_upstream" not in path:
                    found[path] = file  # the others are what compares, full of the names that it compares
        return found | {file.name: file for file in self._more}

    @property
    def files(self) -> dict[str, Path]:
        return self.paths

    @functools.cache  # noqa: B019  the one object of a run
    def text(self, file: str) -> str:
        return self.paths[file].read_text()

    @cached_property
    def _tops(self) -> frozenset[str]:
        return frozenset(path.split("/")[0].removesuffix(".py") for path in self.paths)

    def holds(self, name: str) -> bool:
        return name.split(".")[0] in self._tops

    def top(self, name: str) -> str:
        return name.split(".")[0]

    def shown(self, file: str) -> str:
        """As people name it."""
        path = self.paths[file]
        return path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else path.name
