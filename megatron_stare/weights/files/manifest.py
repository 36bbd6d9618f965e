"""Writes and reads the manifest of a checkpoint. The manifest is a file that lists the name, the
length and the SHA-256 of every other file of the checkpoint.

The process that writes a file also computes the file's checksum, from the bytes that are passed to
the operating system. Only small files that other code wrote are read back to compute their
checksums (see `sums_of`). Every rank computes the checksums of its own files, and the driver
computes the checksums of the files that it adds. Checksums are checked before anything is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError

MANIFEST = "checksums.json"
SHARD = ".distcp"  # suffix of files that hold tensors
FIX = "copy the checkpoint again, or use an earlier one"
_PIECE = 4 * 2**20  # bytes read at a time


@dataclass(frozen=True)
class Sum:
    """Length of a file, and the SHA-256 of its bytes in hexadecimal."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Sum:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def of_file(cls, file: Path) -> Sum:
        """Computes length and checksum of a file. Raises OSError if the file cannot be read."""
        found, size = hashlib.sha256(), 0
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                found.update(piece)
                size += len(piece)
        return cls(size, found.hexdigest())


Sums = Mapping[str, Sum]  # by the file's name in the checkpoint's folder


class SummedFile(io.BufferedWriter):
    """Writes a new file from front to back, and computes the checksum of the written bytes.

    Attributes:
        `failure`: first OSError that a write raised. A library that writes to the file may replace
            this error by an error of its own.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._sha256, self._bytes = hashlib.sha256(), 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self._bytes += memoryview(data).nbytes
        with self._noting():
            return super().write(data)

    def flush(self) -> None:
        with self._noting():
            super().flush()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("bytes that are written twice would be summed twice")

    def sum(self) -> Sum:
        """Returns length and checksum of all bytes that were written so far."""
        return Sum(self._bytes, self._sha256.hexdigest())


def write_manifest(folder: Path, sums: Sums) -> None:
    """Writes the manifest. Raises OSError if the manifest cannot be written."""
    files = {name: vars(each) for name, each in sorted(sums.items())}
    (folder / MANIFEST).write_text(json.dumps({"files": files, "sha256": _own(files)}, indent=1))


def read_manifest(folder: Path) -> dict[str, Sum] | None:
    """Returns lengths and checksums of all files of a checkpoint. Returns None if the checkpoint
    has no manifest. Checkpoints of earlier releases have no manifest.

    Raises:
        DataError: the manifest itself is damaged.
    """
    file = folder / MANIFEST
    try:
        tree = json.loads(file.read_bytes())
        files, own = tree["files"], tree["sha256"]
        if own != _own(files):
            raise ValueError("its own checksum does not match")
        return {name: Sum(**each) for name, each in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(
            f"the list of checksums is damaged ({error})", where=str(file), fix=FIX
        ) from error


def check_lengths(folder: Path, sums: Sums) -> None:
    """Raises DataError if a file is missing, or if a file's length differs from the length in the
    manifest. The error names the first missing or wrong file."""
    for name, written in sums.items():
        file = folder / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DataError(
                "a file of the checkpoint is missing", where=str(file), fix=FIX
            ) from error
        if size != written.size:
            how = "cut short" if size < written.size else "longer than it was written"
            raise DataError(
                f"{how}: {size:,} of {written.size:,} bytes are there", where=str(file), fix=FIX
            )


def check_bytes(folder: Path, sums: Sums, threads: int = 1) -> None:
    """Reads the files completely. Raises DataError if the bytes of a file differ from the bytes
    that were written. The error names the first damaged file."""

    def check(name: str) -> None:
        try:
            found = Sum.of_file(folder / name)
        except OSError as error:
            raise DataError(
                f"cannot be read ({error.strerror})", where=str(folder / name), fix=FIX
            ) from error
        if found != sums[name]:
            raise DataError(
                f"damaged: its SHA-256 is {found.sha256[:16]}..., and {sums[name].sha256[:16]}..."
                " was written",
                where=str(folder / name),
                fix=FIX,
            )

    with ThreadPoolExecutor(threads) as pool:  # hashing releases the interpreter's lock
        list(pool.map(check, sums))


def tensors_of(sums: Sums) -> dict[str, Sum]:
    """Returns the entries of the tensor files. Tensor files are large, and a checkpoint contains
    many tensor files."""
    return {name: each for name, each in sums.items() if name.endswith(SHARD)}


def shares(sums: Sums, ranks: int) -> list[dict[str, Sum]]:
    """Assigns each file to one rank, so that all ranks get about the same number of bytes. The
    largest files are assigned first. Each file is assigned to the rank to which the fewest bytes
    have been assigned so far."""
    dealt: list[dict[str, Sum]] = [{} for _ in range(ranks)]
    size = [0] * ranks
    for name in sorted(sums, key=lambda name: (-sums[name].size, name)):
        rank = size.index(min(size))
        dealt[rank][name] = sums[name]
        size[rank] += sums[name].size
    return dealt


def sums_of(folder: Path, names: Iterable[str]) -> dict[str, Sum]:
    """Returns lengths and checksums of small files that other code wrote. Raises OSError if a file
    cannot be read."""
    return {name: Sum.of_file(folder / name) for name in names}


def put(file: Path, content: bytes) -> Sum:
    """Writes a small file and returns its length and checksum. Raises OSError if the file cannot
    be written."""
    file.write_bytes(content)
    return Sum.of(content)


def _own(files: Any) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
