"""The files of a Hugging Face folder: created at their final size with headers and index, then filled tensor by tensor,
by whoever has them. Every folder that is written is written so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_stare.weights.files.hf_folder import INDEX, copy_companions
from megatron_stare.weights.files.open_files import OpenFiles
from megatron_stare.weights.files.safetensors_file import Entry, lay_out, write_rows
from megatron_stare.weights.files.staging import staging

SHARD_BYTES = 4 << 30  # a file's size is at most this, unless one tensor is larger

Shapes = Mapping[str, tuple[int, ...]]  # by tensor name


def create_shards(
    folder: Path, parts: Sequence[Shapes], dtype: torch.dtype, shard_bytes: int = SHARD_BYTES, step: int | None = None
) -> dict[str, Entry]:
    """Creates the folder's weight files with headers and index, and reserves the disk space of all tensors.

    Args:
        parts: the tensors of each of those who fill the files; no file is of two of them.
        step: of the run whose policy it is, for `exported_step`.

    Returns where each tensor goes. Raises OSError where the disk is full.
    """
    shards = [shard for part in parts for shard in _cut(part, dtype, shard_bytes)]
    entries: dict[str, Entry] = {}
    for number, tensors in enumerate(shards, 1):
        single = len(shards) == 1
        file = folder / ("model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        header, placed = lay_out(file, tensors, dtype, {} if step is None else {"step": str(step)})
        end = max(entry.start + entry.nbytes for entry in placed.values())
        with file.open("wb") as stream:
            stream.write(header)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, end)  # a full disk shows now, not half way
        entries |= placed
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
            "weight_map": {name: entry.file.name for name, entry in entries.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return entries


def _cut(tensors: Shapes, dtype: torch.dtype, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if not shards or size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards


def fill(entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Puts whole tensors into their files; they are on disk when this returns. Raises OSError."""
    with OpenFiles(os.O_WRONLY) as files:
        for name, tensor in tensors:
            entry = entries[name]
            write_rows(files[entry.file], entry, 0, tensor.cpu().contiguous())
        files.sync()


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json says it."""
    return str(dtype).removeprefix("torch.")


def write_folder(
    path: str | Path, tensors: Mapping[str, Tensor], companions_from: str | Path, step: int | None = None
) -> None:
    """Writes a folder that `transformers` loads: weights of one dtype, and config and tokenizer of `companions_from`;
    config.json is made to say the dtype, which `transformers` loads them in. What was there is replaced in the end.

    Raises:
        UserError: it cannot be written.
    """
    (dtype,) = {tensor.dtype for tensor in tensors.values()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with staging(Path(path), nbytes, replace=True) as folder:
        fill(create_shards(folder, [shapes], dtype, step=step), tensors.items())
        copy_companions(Path(companions_from), folder, dtype_name(dtype))
