"""Reads both sides of a conversion again and compares them bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.blocks import Block, places, to_megatron
from megatron_stare.weights.files.buffer import Buffer
from megatron_stare.weights.files.convert_progress import Progress
from megatron_stare.weights.files.open_files import OpenFiles
from megatron_stare.weights.files.processes import Advance, run_parts
from megatron_stare.weights.files.safetensors_file import Entry, read_rows
from megatron_stare.weights.files.torch_dist import TorchDist


@dataclass(frozen=True)
class ComparedPart:
    """The blocks that one process compares."""

    entries: dict[str, Entry]
    checkpoint: Path
    shape: ModelShape
    blocks: list[Block]
    dtype: torch.dtype


def compare(
    entries: dict[str, Entry], checkpoint: Path, shape: ModelShape, parts: Sequence[list[Block]], dtype: torch.dtype
) -> None:
    """Every element of the model is the same in Hugging Face files and checkpoint.

    Args:
        entries: where the Hugging Face tensors lie.
        dtype: of the converted side. Where that is the narrower one, the other side is rounded as converting does.

    Raises:
        DataError: naming the tensors that differ.
    """
    total = sum(block.elements for part in parts for block in part)
    jobs = [ComparedPart(entries, checkpoint, shape, part, dtype) for part in parts]
    with Progress("check", total * dtype.itemsize) as progress:
        different = [name for found in run_parts(compare_part, jobs, progress.advance) for name in found]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise DataError(f"the two sides differ in {different[0]!r}{more}", where=str(checkpoint), fix="convert again")


def compare_part(part: ComparedPart, advance: Advance) -> list[str]:
    """The Megatron names of parameters that differ."""
    different: dict[str, None] = {}
    buffer = Buffer()
    with TorchDist(part.checkpoint, buffer) as checkpoint, OpenFiles(os.O_RDONLY) as files:
        for block in part.blocks:
            buffer.clear()
            found = [part.entries[at.name] for at in block.hf]
            pieces = zip(found, block.hf, strict=True)
            hf = to_megatron(
                block, [read_rows(files[e.file], e, at.start, at.stop, buffer) for e, at in pieces], part.shape
            )
            for place in places(block.rule.megatron):
                if place.key in checkpoint.sizes:
                    megatron = checkpoint.rows(place, block.start, block.stop)
                    if not same_bits(hf, megatron, part.dtype):
                        different[block.rule.megatron] = None
            advance(block.elements * part.dtype.itemsize)
    return list(different)


def same_bits(a: Tensor, b: Tensor, converted: torch.dtype) -> bool:
    """Whether two tensors are equal to the bit in the narrower of their dtypes; of two as wide, in `converted`."""
    if a.dtype != b.dtype:
        narrow = min(a.dtype, b.dtype, key=lambda dtype: (dtype.itemsize, dtype != converted))
        a, b = a.to(narrow), b.to(narrow)
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
