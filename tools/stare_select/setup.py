"""Builds the wheel `stare-select` from the files of megatron_stare.

`megatron_stare/select/` becomes the package `stare_select`; the modules that it imports become its
sub-packages. The build renames the package in the copied text and changes nothing else. Only a
wheel can be built, and only inside the repository.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "megatron_stare"
NAME = "stare_select"
STARTS = ("select", "algorithms")


def imported(file: Path) -> set[Path]:
    """Returns the files of megatron_stare that a file imports, with their packages."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] != SOURCE.name:
                continue
            for end in range(2, len(parts) + 1):
                path = SOURCE.joinpath(*parts[1:end])
                found |= {f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()}
    return found


def sources() -> list[Path]:
    """Returns the files of the wheel, sorted."""
    waiting = {file for start in STARTS for file in (SOURCE / start).glob("*.py")}
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        found.add(file)
        waiting |= imported(file) - found
    return sorted(found)


def target(file: Path) -> Path:
    """Returns the path inside the wheel."""
    inside = file.relative_to(SOURCE)
    return Path(NAME, *(inside.parts[1:] if inside.parts[0] == "select" else inside.parts))


def renamed(text: str) -> str:
    """Returns the text with the package's new name."""
    text = re.sub(rf"\b{SOURCE.name}\.select\b", NAME, text)
    return re.sub(rf"\b{SOURCE.name}\b", NAME, text)


class BuildRenamed(build_py):
    """build_py that copies `sources` under the new name and adds py.typed."""

    def run(self) -> None:
        if self.editable_mode:
            raise SystemExit("stare-select: no editable install; use megatron_stare.select instead")
        for file in sources():
            self._write(target(file), renamed(file.read_text()))
        self._write(Path(NAME, "py.typed"), "")

    def _write(self, inside: Path, text: str) -> None:
        path = Path(self.build_lib, inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        inside = [*map(target, sources()), Path(NAME, "py.typed")]
        return [str(Path(self.build_lib, each)) for each in inside]

    def get_source_files(self) -> list[str]:
        return []


def version() -> str:
    text = (SOURCE / "select" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


setup(
    version=version(),
    packages=[NAME],
    package_dir={NAME: str(Path("..", "..", SOURCE.name, "select"))},
    cmdclass={"build_py": BuildRenamed},
)
