"""Reads rows of tensors from megatron-core's distributed checkpoints (format torch_dist), without a
process group.

The files have the format of torch.distributed.checkpoint. `.metadata` lists the tensors. For each
chunk of a tensor, `.metadata` gives the file and the byte range. Each chunk is stored as one
tensor, written by torch.save. Megatron adds `metadata.json` and `common.pt`. `check_checkpoint`
compares the tensors with a model's config.json, using only the metadata.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_stare.errors import DataError
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.blocks import Block, Place, places
from megatron_stare.weights.files.open_files import OpenFiles
from megatron_stare.weights.files.safetensors_file import NAMES, Buffer, read_bytes

_STEP = re.compile(r"step_\d+$")
_FIX = "copy the checkpoint again, or use an earlier one"
_OF_THE_MODEL = re.compile(r"(decoder|embedding|output_layer)\.")
_NOT_TOGETHER = "config.json and the checkpoint do not belong together"


def find(path: Path) -> Path:
    """Returns the checkpoint folder that `path` stands for. If `path` is a run directory, returns
    the folder of the run's newest checkpoint. If `path` is a Megatron-LM folder, returns the folder
    of the latest checkpoint in `path`. Otherwise, returns `path` itself.

    Raises:
        DataError: `path` leads to no checkpoint folder.
    """
    latest = path / "latest_checkpointed_iteration.txt"
    if latest.exists():
        name = latest.read_text().strip()
        path = path / (name if name == "release" else f"iter_{int(name):07d}")
    elif (path / "checkpoints").is_dir():
        found = sorted(p for p in (path / "checkpoints").iterdir() if _STEP.match(p.name))
        path = found[-1] if found else path
    if not is_checkpoint(path):
        raise DataError(
            "neither a Hugging Face folder (config.json) nor a distributed checkpoint (.metadata"
            " and metadata.json)",
            where=str(path),
        )
    return path


def is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").exists() and (path / "metadata.json").exists()


def check_files(path: str | Path) -> None:
    """Raises DataError if a file of a checkpoint is missing, or shorter than the metadata says."""
    TorchDist(path)  # checks the files as it reads the metadata


@dataclass(frozen=True)
class Chunk:
    """Part of a tensor, and the byte range of this part in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int


class TorchDist:
    """A checkpoint that is open for reading. TorchDist is a context manager that keeps files open
    between reads."""

    def __init__(self, path: str | Path, buffer: Buffer | None = None) -> None:
        """Reads the metadata.

        Args:
            buffer: memory into which rows are read; None for new memory in each read.

        Raises:
            DataError: the metadata cannot be read, or a file is missing or shorter than the
                metadata says.
        """
        self.path, self._buffer = Path(path), buffer
        try:
            metadata = FileSystemReader(self.path).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise DataError(
                f"the metadata cannot be read: {error}", where=str(self.path), fix=_FIX
            ) from error
        tensors = {
            k: m
            for k, m in metadata.state_dict_metadata.items()
            if isinstance(m, TensorStorageMetadata)
        }
        self.sizes = {key: tuple(m.size) for key, m in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {
            key: m.properties.dtype for key, m in tensors.items()
        }
        self.chunks: dict[str, list[Chunk]] = defaultdict(list)
        sizes = {(key, c.offsets): tuple(c.sizes) for key, m in tensors.items() for c in m.chunks}
        ends: dict[str, int] = defaultdict(int)
        for index, at in metadata.storage_data.items():
            ends[at.relative_path] = max(ends[at.relative_path], at.offset + at.length)
            if index.fqn in tensors:
                chunk = Chunk(
                    tuple(index.offset),
                    sizes[index.fqn, index.offset],
                    at.relative_path,
                    at.offset,
                    at.length,
                )
                self.chunks[index.fqn].append(chunk)
        for file, end in ends.items():
            self._check_file(self.path / file, end)
        self._files = OpenFiles(os.O_RDONLY)
        self._by_lead: dict[tuple[str, int], dict[tuple[int, ...], list[Chunk]]] = {}
        self._stored: dict[Chunk, tuple[Tensor, int]] = {}

    def __enter__(self) -> TorchDist:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def _check_file(self, file: Path, end: int) -> None:
        if not file.exists():
            raise DataError("a file of the checkpoint is missing", where=str(file), fix=_FIX)
        if (size := file.stat().st_size) < end:
            raise DataError(
                f"cut short: {size:,} of {end:,} bytes are there", where=str(file), fix=_FIX
            )

    def place(self, megatron: str) -> Place:
        """Returns the place at which this checkpoint stores a parameter. Raises DataError if this
        checkpoint lacks the parameter."""
        for place in places(megatron):
            if place.key in self.sizes:
                return place
        raise DataError(
            f"the parameter {megatron!r} is missing",
            where=str(self.path),
            fix="config.json and the checkpoint do not belong together",
        )

    def position(self, block: Block) -> tuple[str, int]:
        """Returns a sort key for a block. The key consists of a file name and a number. The file is
        the one that stores the block's first row. The number is a sort key: the byte offset of the
        row's chunk in this file, plus the row's index in this chunk. If blocks are sorted by this
        key, the chunks of each file are read from front to back."""
        place = self.place(block.rule.megatron)
        dims = len(place.lead)
        for chunk in self._chunks_at(place):
            if 0 <= (row := block.start - chunk.offsets[dims]) < chunk.sizes[dims]:
                return chunk.file, chunk.start + row
        return "", 0

    def _chunks_at(self, place: Place) -> list[Chunk]:
        """Returns the chunks that store any part of the parameter at `place`."""
        dims = len(place.lead)
        if (place.key, dims) not in self._by_lead:
            by_lead: dict[tuple[int, ...], list[Chunk]] = defaultdict(list)
            for chunk in self.chunks[place.key]:
                spans = (
                    range(o, o + n)
                    for o, n in zip(chunk.offsets[:dims], chunk.sizes[:dims], strict=True)
                )
                for lead in itertools.product(*spans):
                    by_lead[lead].append(chunk)
            self._by_lead[place.key, dims] = by_lead
        return self._by_lead[place.key, dims][place.lead]

    def rows(self, place: Place, start: int, stop: int) -> Tensor:
        """Reads rows [start, stop) of the parameter at `place`. If the checkpoint stacks layers or
        experts in one tensor, `place.lead` selects the parameter in the stacked tensor.

        Raises:
            DataError: some rows are missing.
        """
        dims = len(place.lead)
        size = (stop - start, *self.sizes[place.key][dims + 1 :])
        whole: Tensor | None = None
        missing = math.prod(size)
        for chunk in self._chunks_at(place):
            first, rows = chunk.offsets[dims], chunk.sizes[dims]
            low, high = max(start, first), min(stop, first + rows)
            if low >= high:
                continue
            index = tuple(i - o for i, o in zip(place.lead, chunk.offsets, strict=False))
            part = self._read(chunk, index, low - first, high - first)
            missing -= part.numel()
            if part.shape == size:
                return part
            if whole is None:
                whole = torch.empty(size, dtype=part.dtype)
            columns = tuple(
                slice(o, o + n)
                for o, n in zip(chunk.offsets[dims + 1 :], part.shape[1:], strict=True)
            )
            whole[(slice(low - start, high - start), *columns)] = part
        if whole is None or missing:
            raise DataError(f"{place.key!r} is not complete", where=str(self.path), fix=_FIX)
        return whole

    def span(self, place: Place, start: int, stop: int) -> tuple[int, int] | None:
        """Returns the descriptor of the file that contains rows [start, stop) of the parameter at
        `place`, and the byte offset of the rows in this file. Returns None if the rows are not
        contiguous in one file."""
        dims = len(place.lead)
        columns = self.sizes[place.key][dims + 1 :]
        for chunk in self._chunks_at(place):
            first, rows = chunk.offsets[dims], chunk.sizes[dims]
            if first <= start and stop <= first + rows and chunk.sizes[dims + 1 :] == columns:
                index = tuple(i - o for i, o in zip(place.lead, chunk.offsets, strict=False))
                return (
                    self._files[self.path / chunk.file],
                    self._find(chunk, index, start - first, stop - first)[0],
                )
        return None

    def _read(self, chunk: Chunk, index: tuple[int, ...], start: int, stop: int) -> Tensor:
        """Reads rows [start, stop) of one matrix in a stored chunk, and no other bytes of the file.
        `index` selects the matrix in the chunk."""
        at, part = self._find(chunk, index, start, stop)
        file = self.path / chunk.file
        data = read_bytes(self._files[file], at, part.numel() * part.itemsize, file, self._buffer)
        return data.view(part.dtype).view(part.shape)

    def _find(
        self, chunk: Chunk, index: tuple[int, ...], start: int, stop: int
    ) -> tuple[int, Tensor]:
        """Finds rows [start, stop) of one matrix in a stored chunk. Returns the position of the
        rows' first byte in the chunk's file, and the rows as a meta tensor, which has a shape but
        no data.

        Args:
            index: indices that select the matrix in the chunk.
        """
        like, first = self._skeleton(chunk)
        part = like[index][start:stop]
        if not part.is_contiguous():  # neither Megatron nor torch writes such tensors
            raise DataError(
                "a tensor's elements are not stored in order", where=str(self.path / chunk.file)
            )
        return first + int(part.storage_offset()) * part.itemsize, part

    def _skeleton(self, chunk: Chunk) -> tuple[Tensor, int]:
        """Returns the chunk as a meta tensor (with a shape but no data), and the offset in the file
        at which the chunk's data starts."""
        if chunk not in self._stored:
            with (self.path / chunk.file).open("rb") as stream:
                view = cast(IO[bytes], _create_file_view(stream, chunk.start, chunk.nbytes))
                try:
                    like = torch.load(view, map_location="meta", weights_only=True)
                except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
                    reason = str(error).splitlines()[0]
                    raise DataError(
                        f"a tensor cannot be read: {reason}", where=str(stream.name), fix=_FIX
                    ) from error
            # torch.load records the offset of a storage that it loads without data
            self._stored[chunk] = like, chunk.start + like.untyped_storage()._checkpoint_offset
        return self._stored[chunk]


def check_checkpoint(checkpoint: TorchDist, shape: ModelShape, blocks: Sequence[Block]) -> None:
    """Checks that the checkpoint holds exactly the model's parameters, in the right shapes.
    Parameters with one row per vocabulary entry may have padding rows. Ignores tensors that are not
    part of the model, such as optimizer states.

    Raises:
        DataError: the first mismatch.
    """
    used = set()
    for rule, size in {block.rule: block.size for block in blocks}.items():
        place = checkpoint.place(rule.megatron)
        used |= {candidate.key for candidate in places(rule.megatron)}
        found = checkpoint.sizes[place.key]
        counts = tuple(shape.experts if n == "experts" else shape.layers for n in place.dims)
        lead, own = found[: len(counts)], found[len(counts) :]
        if lead != counts:
            raise DataError(
                f"{place.key!r} stacks {lead}, config.json has {counts} {' x '.join(place.dims)}",
                where=str(checkpoint.path),
                fix=_NOT_TOGETHER,
            )
        padded = (
            rule.layout == "vocab"
            and len(own) == len(size)
            and own[0] >= size[0]
            and own[1:] == size[1:]
        )
        if own != size and not padded:
            raise DataError(
                f"{place.key!r} has the shape {own}, config.json makes it {size}",
                where=str(checkpoint.path),
                fix=_NOT_TOGETHER,
            )
        if checkpoint.dtypes[place.key] not in NAMES:
            raise DataError(
                f"{place.key!r} is of dtype {checkpoint.dtypes[place.key]}",
                where=str(checkpoint.path),
            )
    for key in checkpoint.sizes:
        if _OF_THE_MODEL.match(key) and key not in used and not key.endswith("_extra_state"):
            raise DataError(
                f"the tensor {key!r} is not one of a {shape.family} model as config.json"
                " describes it",
                where=str(checkpoint.path),
                fix=_NOT_TOGETHER,
            )
