"""Copies between open files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_stare.errors import DataError
from megatron_stare.weights.files.open_files import OpenFiles, copy_range


def refuse(*_: object) -> int:
    raise OSError(errno.EXDEV, "another file system")


@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_part_is_copied_to_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_kernel: bool
) -> None:
    if not by_kernel:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    (tmp_path / "source").write_bytes(bytes(range(100)))
    (tmp_path / "target").write_bytes(bytes(50))
    with OpenFiles(os.O_RDWR) as files:
        source, target = files[tmp_path / "source"], files[tmp_path / "target"]
        copy_range(source, 30, target, 5, 20)
        assert (tmp_path / "target").read_bytes() == bytes(5) + bytes(range(30, 50)) + bytes(25)
        with pytest.raises(DataError, match="became shorter"):
            copy_range(source, 90, target, 0, 20)
