"""Fills the files of a Hugging Face folder from a distributed checkpoint, rows by rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.blocks import Block, Place, to_hf
from megatron_stare.weights.files.buffer import Buffer
from megatron_stare.weights.files.open_files import OpenFiles, copy_range
from megatron_stare.weights.files.processes import Advance
from megatron_stare.weights.files.safetensors_file import DTYPES, Entry, write_rows
from megatron_stare.weights.files.torch_dist import TorchDist


@dataclass(frozen=True)
class HfPart:
    """The blocks that one process writes, and where from and to."""

    checkpoint: Path
    entries: dict[str, Entry]
    shape: ModelShape
    blocks: list[Block]


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
