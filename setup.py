"""Packaging lives in pyproject.toml; this adds to a wheel what lies beside the package: configs,
assets and tools.

They go into `megatron_stare/share/`, where `megatron_stare/process/shipped.py` finds them. An
editable install, as the scripts make it, uses the ones of the checkout.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHARE = "megatron_stare/share"
FOLDERS = ("configs", "assets", "tools")
LEFT_OUT = (
    "__pycache__",
    "make_config_docs.py",  # the page it writes is the repository's
    "stare_select",  # builds a wheel of its own, from the repository
)


class BuildWithShare(build_py):
    """build_py that copies FOLDERS; an sdist has them too, because they are among its source
    files."""

    def _shared(self) -> list[Path]:
        files = (
            file for folder in FOLDERS for file in sorted(Path(folder).rglob("*")) if file.is_file()
        )
        return [file for file in files if not set(LEFT_OUT) & set(file.parts)]

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for file in self._shared():
            target = Path(self.build_lib, SHARE, file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        shared = (
            []
            if self.editable_mode
            else [str(Path(self.build_lib, SHARE, file)) for file in self._shared()]
        )
        return super().get_outputs(include_bytecode) + shared

    def get_source_files(self) -> list[str]:
        return super().get_source_files() + [str(file) for file in self._shared()]


setup(cmdclass={"build_py": BuildWithShare})
