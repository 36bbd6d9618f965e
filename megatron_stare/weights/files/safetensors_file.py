"""Reads and writes safetensors files piece by piece. This module also reads and creates the headers
of the files. A file's header gives the place of each tensor in the file.

A file holds the length of its header (8 bytes), then the header (JSON with the name, dtype, shape
and byte range of each tensor), then the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_stare.errors import DataError

_ALIGNED = 64  # bytes
# dtypes that weights may have, as safetensors spells them
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# names for writing; engines alone read 8-bit weights
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}
_LONGEST_HEADER = 100_000_000  # bytes, the library's limit


class Buffer:
    """Reusable memory. The method `take` gives parts of the memory to callers. After `clear`,
    callers can take the same memory again.

    A Buffer avoids page faults. Newly allocated memory causes a page fault every 4 KB, but memory
    that is used again causes none.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        # bytes requested since the last `clear`, which grows the memory to this size while nothing
        # points into it
        self._wanted = 0

    def take(self, nbytes: int) -> Tensor:
        """Returns a uint8 tensor [nbytes] with undefined contents. The caller may use the tensor
        until `clear` is called."""
        start, self._used = self._used, self._used + nbytes + -nbytes % _ALIGNED
        self._wanted += nbytes + -nbytes % _ALIGNED
        if self._used > len(self._memory):
            self._used = start
            return torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[start : start + nbytes]

    def clear(self) -> None:
        """Makes all memory of the buffer available to later calls of `take`."""
        if self._wanted > len(self._memory):
            self._memory = torch.empty(self._wanted, dtype=torch.uint8)
        self._used = self._wanted = 0


@dataclass(frozen=True)
class Entry:
    """Position, dtype and shape of a tensor in a safetensors file."""

    file: Path
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    start: int  # the tensor's first byte in the file
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """Returns a dict that maps the name of every tensor in a file to the tensor's Entry. Reads only
    the header.

    Raises:
        DataError: the file is missing, is not a safetensors file, or ends before its last tensor.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise DataError(
                    "not a safetensors file, or cut short within its header",
                    where=str(file),
                    fix=_FIX,
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise DataError(
            f"cannot read the weights ({error.strerror})", where=str(file), fix=_FIX
        ) from error
    except ValueError as error:  # invalid JSON or UTF-8
        raise DataError(f"not a safetensors file: {error}", where=str(file), fix=_FIX) from error
    header.pop("__metadata__", None)
    entries = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        entries[name] = Entry(
            file, entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first
        )
        if 8 + length + last > size:
            raise DataError(
                f"cut short: {size:,} bytes are there, the tensor {name!r} ends at byte"
                f" {8 + length + last:,}",
                where=str(file),
                fix=_FIX,
            )
    return entries


_FIX = "download or copy the file again"


def lay_out(
    file: Path,
    tensors: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> tuple[bytes, dict[str, Entry]]:
    """Lays out a file for tensors of the given shapes. Returns the bytes of the file's header and
    the place of each tensor.

    Args:
        metadata: text for the header.
        others: dtypes of the tensors whose dtype differs from `dtype`.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    position, places = 0, {}
    for name, shape in tensors.items():
        own = others.get(name, dtype)
        nbytes = math.prod(shape) * own.itemsize
        header[name] = {
            "dtype": NAMES[own],
            "shape": shape,
            "data_offsets": [position, position + nbytes],
        }
        places[name] = (position, nbytes)
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8 bytes
    entries = {
        name: Entry(
            file, NAMES[others.get(name, dtype)], tensors[name], 8 + len(text) + start, nbytes
        )
        for name, (start, nbytes) in places.items()
    }
    return len(text).to_bytes(8, "little") + text, entries


def read_bytes(
    descriptor: int, start: int, nbytes: int, file: Path, buffer: Buffer | None = None
) -> Tensor:
    """Reads part of an open file into a uint8 tensor [nbytes]. The tensor uses memory of `buffer`,
    or new memory if `buffer` is None.

    Raises:
        DataError: the file ends too early.
    """
    part = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer.take(nbytes)
    view, done = part.numpy().data, 0
    while done < nbytes:
        got = os.preadv(descriptor, [view[done:]], start + done)
        if got == 0:
            raise DataError(
                f"cut short: there are no bytes after {start + done:,}", where=str(file), fix=_FIX
            )
        done += got
    return part


def read_rows(
    descriptor: int, entry: Entry, start: int, stop: int, buffer: Buffer | None = None
) -> Tensor:
    """Reads rows [start, stop) of a tensor into memory of `buffer`, or into new memory if `buffer`
    is None."""
    width = entry.nbytes // entry.shape[0]
    part = read_bytes(
        descriptor, entry.start + start * width, (stop - start) * width, entry.file, buffer
    )
    return part.view(DTYPES[entry.dtype]).view(stop - start, *entry.shape[1:])


def write_rows(descriptor: int, entry: Entry, start: int, rows: Tensor) -> None:
    """Writes contiguous rows of a tensor into the tensor's file, beginning at the tensor's row
    `start`. The rows must have the tensor's dtype. Raises OSError if the write fails."""
    view = rows.reshape(-1).view(torch.uint8).numpy().data
    position, done = entry.start + start * (entry.nbytes // entry.shape[0]), 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], position + done)
