"""Writes a Hugging Face folder from a distributed checkpoint: files of their final size first, then rows into them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.blocks import Block, Place, to_hf
from megatron_stare.weights.buffer import Buffer
from megatron_stare.weights.check import expected
from megatron_stare.weights.open_files import OpenFiles, copy_range
from megatron_stare.weights.processes import Advance
from megatron_stare.weights.safetensors_file import DTYPES, Entry, lay_out, write_rows
from megatron_stare.weights.torch_dist import TorchDist


@dataclass(frozen=True)
class HfPart:
    """The blocks that one process writes, and where from and to."""

    checkpoint: Path
    entries: dict[str, Entry]
    shape: ModelShape
    blocks: list[Block]


def create_shards(folder: Path, shape: ModelShape, dtype: torch.dtype, shard_bytes: int) -> dict[str, Entry]:
    """Creates the folder's weight files with headers and index, and reserves the disk space of all tensors.

    Returns where each tensor goes. Raises OSError where the disk is full.
    """
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, tensor in expected(shape).items():
        nbytes = math.prod(tensor) * dtype.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += nbytes
    entries: dict[str, Entry] = {}
    for number, tensors in enumerate(shards, 1):
        single = len(shards) == 1
        file = folder / ("model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        header, placed = lay_out(file, tensors, dtype)
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
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return entries


def write_part(part: HfPart, advance: Advance) -> None:
    """Converts the part's blocks and writes them; they are on disk when this returns."""
    buffer = Buffer()
    with TorchDist(part.checkpoint, buffer) as checkpoint, OpenFiles(os.O_WRONLY) as files:
        for block in part.blocks:
            buffer.clear()
            place = checkpoint.place(block.rule.megatron)
            if copied := _copied(checkpoint, place, block, part, files):
                advance(copied)
                continue
            rows = checkpoint.rows(place, block.start, block.stop)
            for at, piece in zip(block.hf, to_hf(block, rows, part.shape), strict=True):
                entry = part.entries[at.name]
                piece = piece.to(DTYPES[entry.dtype])
                write_rows(files[entry.file], entry, at.start, piece)
                advance(piece.nbytes)
        files.sync()


def _copied(checkpoint: TorchDist, place: Place, block: Block, part: HfPart, files: OpenFiles) -> int:
    """Has the kernel copy a block whose bytes are the same on both sides, which costs half of reading and writing it.

    Returns the bytes copied; 0 where they are not the same, or lie in several places.
    """
    (at, *others), entry = block.hf, part.entries[block.hf[0].name]
    if others or DTYPES[entry.dtype] != checkpoint.dtypes[place.key]:
        return 0
    if (found := checkpoint.span(place, block.start, block.stop)) is None:
        return 0
    width = entry.nbytes // entry.shape[0]
    copy_range(found[0], found[1], files[entry.file], entry.start + at.start * width, (at.stop - at.start) * width)
    return (at.stop - at.start) * width
