"""Creates an output folder. An incomplete output folder never has the final name. The output is
written to a temporary folder beside the target folder. When the output is complete, the temporary
folder is renamed to the name of the target folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron_stare.errors import UserError


@contextlib.contextmanager
def staging(target: Path, nbytes: int, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder. If the context ends without an error, the folder is flushed to disk
    and renamed to `target`. Otherwise the folder is removed.

    Args:
        nbytes: number of bytes to be written. The free disk space is checked before the context
            begins.
        replace: whether to replace an existing `target` at the end. If False, an existing `target`
            that is not an empty folder is refused.

    Raises:
        UserError: `target` is refused, or cannot be written (for example, the disk is full).
    """
    if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            "there is something here already",
            where=str(target),
            fix="remove it, or name another folder",
        )
    folder = target.with_name(target.name + ".tmp")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a killed conversion
        folder.mkdir(parents=True)
        if (free := shutil.disk_usage(folder).free) < nbytes:
            raise UserError(
                f"the disk has {free / 1e9:.1f} GB left, {nbytes / 1e9:.1f} are needed",
                where=str(target),
                fix="free some, or name a folder on another disk",
            )
        yield folder
        for path in (*folder.iterdir(), folder):
            sync_entry(path)
        if target.exists():
            shutil.rmtree(target) if replace else target.rmdir()
        folder.rename(target)
        sync_entry(target.parent)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror})",
            where=str(target),
            fix="check whether the disk is full",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sync_entry(path: Path) -> None:
    """Flushes the contents of a file, or the directory entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
