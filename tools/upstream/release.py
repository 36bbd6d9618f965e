"""The Python files of one release of an upstream, read from a wheel or from the folder it is installed in."""

from __future__ import annotations

import os
import re
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_stare.errors import UserError

# distribution, as its wheels spell it -> the package whose names are compared
PACKAGES = {"megatron_core": "megatron.core", "sglang": "sglang"}
_SGLANG_PYTHON = "MEGATRON_STARE_SGLANG_PYTHON"  # as megatron_stare.rollout.engines.sglang.replica reads it
_WHEEL_OR_FOLDER = "give a wheel (.whl) of megatron-core or SGLang, or the folder one of them is installed in"


@dataclass(frozen=True)
class Release:
    """One release, whose files are read when they are asked for.

    distribution: key of PACKAGES.
    path: the wheel, or the folder that holds the package and its `.dist-info`.
    """

    distribution: str
    version: str
    path: Path

    @property
    def package(self) -> str:
        return PACKAGES[self.distribution]

    @property
    def title(self) -> str:
        return f"{self.distribution.replace('_', '-')} {self.version}"

    def holds(self, name: str) -> bool:
        return name == self.package or name.startswith(self.package + ".")

    def top(self, name: str) -> str:
        return self.package

    @cached_property
    def _zip(self) -> zipfile.ZipFile | None:
        return None if self.path.is_dir() else zipfile.ZipFile(self.path)

    @cached_property
    def files(self) -> frozenset[str]:
        """Its Python files, relative to where packages are installed."""
        inside = self.package.replace(".", "/") + "/"
        if self._zip is not None:
            names: Iterator[str] = iter(self._zip.namelist())
        else:
            names = (file.relative_to(self.path).as_posix() for file in (self.path / inside).rglob("*.py"))
        return frozenset(name for name in names if name.startswith(inside) and name.endswith(".py"))

    def text(self, file: str) -> str:
        """The source of one of `files`."""
        data = self._zip.read(file) if self._zip is not None else (self.path / file).read_bytes()
        return data.decode("utf-8", errors="replace")


def open_release(path: Path) -> Release:
    """The release in a wheel or installed folder.

    Raises:
        UserError: there is none, it is of neither upstream, or it cannot be read.
    """
    if path.is_dir():
        return _installed(path)
    if not path.exists():
        raise UserError("there is no such file or folder", where=str(path), fix=_WHEEL_OR_FOLDER)
    if path.suffix != ".whl":
        raise UserError("this is not a wheel", where=str(path), fix=_WHEEL_OR_FOLDER)
    try:
        with zipfile.ZipFile(path) as wheel:
            broken, names = wheel.testzip(), wheel.namelist()
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise UserError(f"this wheel cannot be read: {error}", where=str(path), fix="download it again") from error
    if broken:
        raise UserError(f"this wheel is damaged at {broken}", where=str(path), fix="download it again")
    return _found(names, path, path)


def _installed(folder: Path) -> Release:
    """The release whose package, or part of one, is this folder: `.dist-info` lies beside it or above."""
    folder = folder.resolve()
    for place in (folder.parent, folder.parent.parent):
        inside = folder.relative_to(place).as_posix()
        wanted = {
            d for d, package in PACKAGES.items() if package.replace(".", "/").split("/")[0] == inside.split("/")[0]
        }
        names = [
            f"{info.name}/METADATA"
            for info in place.glob("*.dist-info")
            if info.name.split("-")[0].lower() in wanted and (info / "METADATA").is_file()
        ]
        if names:
            return _found(names, place, folder)
    raise UserError("no release of megatron-core or SGLang is installed here", where=str(folder), fix=_WHEEL_OR_FOLDER)


def _found(names: list[str], path: Path, given: Path) -> Release:
    infos = [re.fullmatch(r"([^/-]+)-([^/]+)\.dist-info/METADATA", name) for name in names]
    for match in infos:
        if match and match[1].lower() in PACKAGES:
            release = Release(match[1].lower(), match[2], path)
            if release.files:
                return release
    of = ", ".join(sorted({match[1] for match in infos if match})) or "nothing that names itself"
    raise UserError(f"this holds {of}, not megatron-core or SGLang", where=str(given), fix=_WHEEL_OR_FOLDER)


def pinned_release(distribution: str, root: Path) -> Release:
    """The release that this project runs with: of this Python's environment, SGLang's of its own. Nothing of it is
    imported.

    Args:
        root: of the checkout, where scripts/setup_sglang.sh puts SGLang's environment.

    Raises:
        UserError: it is not installed.
    """
    python = os.environ.get(_SGLANG_PYTHON, str(root / ".venv-sglang" / "bin" / "python"))
    places = [sysconfig.get_path("purelib"), *map(str, Path(python).parent.parent.glob("lib/python3*/site-packages"))]
    for place in places:
        folder = Path(place) / PACKAGES[distribution].replace(".", "/")
        if folder.is_dir():
            return _installed(folder)
    raise UserError(
        f"{distribution.replace('_', '-')} is not installed in the project's environments to be compared with",
        where="--against",
        fix="name a wheel of the release this project is pinned to, or the folder it is installed in",
    )
