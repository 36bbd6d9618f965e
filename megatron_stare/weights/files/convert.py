"""Converts Hugging Face folders to Megatron's distributed checkpoints and back, block by block, in
several processes.

A distributed checkpoint does not depend on the parallel layout. A checkpoint that this module
writes can be loaded at any degree of tensor, pipeline, virtual pipeline and expert parallelism.
This module also reads checkpoints that were saved with any parallel layout. The page
docs/checkpoints.md describes the formats. An optional check reads source and result again, and
compares the result with the source bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from rich import progress as rich
from torch import Tensor

from megatron_stare.config.layers import read_yaml
from megatron_stare.errors import ConfigError, DataError
from megatron_stare.models import family_of, read_shape
from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files import torch_dist
from megatron_stare.weights.files.blocks import Block, Place, cut, places, to_hf, to_megatron
from megatron_stare.weights.files.check import check_folder, expected
from megatron_stare.weights.files.hf_folder import (
    SHARD_BYTES,
    add_stops,
    copy_companions,
    create_shards,
    dtype_name,
)
from megatron_stare.weights.files.open_files import OpenFiles, copy_range
from megatron_stare.weights.files.processes import Advance, run_parts
from megatron_stare.weights.files.safetensors_file import (
    DTYPES,
    Buffer,
    Entry,
    read_rows,
    write_rows,
)
from megatron_stare.weights.files.staging import staging
from megatron_stare.weights.files.torch_dist import TorchDist, check_checkpoint
from megatron_stare.weights.files.torch_dist_writer import (
    finish_checkpoint,
    plan_parts,
    write_checkpoint_part,
)

_LINE_EVERY_S = 5.0


@dataclass(frozen=True)
class Options:
    """Options of a conversion.

    Args:
        dtype: dtype of the result; None for the dtype of the source.
        processes: number of processes that read, convert and write.
        shard_bytes: maximum size of a safetensors file, unless a single tensor is larger.
        check: read source and result again, and compare the result with the source.
    """

    dtype: torch.dtype | None = None
    processes: int = 1
    shard_bytes: int = SHARD_BYTES
    check: bool = False


def convert(source: Path, target: Path, model: Path | None, options: Options) -> None:
    """Converts a Hugging Face folder to a distributed checkpoint, or a distributed checkpoint to a
    Hugging Face folder. The direction depends on `source`.

    Args:
        model: Hugging Face folder with config.json and tokenizer, for a distributed checkpoint. If
            `model` is None, the folder comes from `companions_of`.

    Raises:
        UserError: source and model do not match, or the disk is full. `target` then does not exist.
    """
    if (source / "config.json").exists() and not torch_dist.is_checkpoint(source):
        hf_to_megatron(source, target, options)
    else:
        checkpoint = torch_dist.find(source)
        megatron_to_hf(checkpoint, target, model or companions_of(checkpoint), options)


def companions_of(checkpoint: Path) -> Path:
    """Returns the folder that contains a checkpoint's config.json and tokenizer. The folder is the
    checkpoint itself, or the model folder from which the checkpoint's run started."""
    run_dir = checkpoint.resolve().parent.parent
    recorded = run_dir / "config.yaml"
    started_from = []
    if recorded.exists():
        path = Path(read_yaml(recorded)["model"]["path"])  # same key in every configuration format
        # the first format recorded the path unresolved, relative to a folder above the run
        started_from = (
            [path] if path.is_absolute() else [*(above / path for above in run_dir.parents), path]
        )
    for folder in (checkpoint, *started_from):
        if (folder / "config.json").exists():
            return folder
    raise ConfigError(
        "the checkpoint does not say what model it is",
        where=str(checkpoint),
        fix="name the Hugging Face folder with its config.json and tokenizer: --model HF_DIR",
    )


def stops_of(checkpoint: Path) -> list[int]:
    """Returns the field `stops` from a checkpoint's run_state.json. If the run trained on
    demonstrations, `stops` contains the ids of the tokens that end the assistant's turns. Returns
    [] if the checkpoint has no readable run_state.json, or if run_state.json has no field
    `stops`."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return json.loads((checkpoint / "run_state.json").read_text()).get("stops", [])
    return []


def hf_to_megatron(source: Path, target: Path, options: Options) -> None:
    """Writes a folder's weights as a distributed checkpoint, with config.json and tokenizer beside
    the weights."""
    shape = read_shape(source)
    entries = check_folder(source, shape)
    family = family_of(shape)
    moving = (DTYPES[entry.dtype] for name, entry in entries.items() if not family.float32(name))
    dtype = options.dtype or _only(moving, source)

    def position(block: Block) -> tuple[str, int]:
        entry = entries[block.hf[0].name]
        return str(entry.file), entry.start + block.hf[0].start

    blocks = sorted(cut(shape), key=position)  # so that files are read from front to back
    total = _bytes(blocks, dtype)
    with staging(target, total) as folder:
        parts, metadata = plan_parts(
            folder, _split(blocks, options.processes), entries, shape, dtype
        )
        with Progress("convert", total) as progress:
            results = run_parts(write_checkpoint_part, parts, progress.advance)
        finish_checkpoint(folder, metadata, results)
        copy_companions(source, folder, dtype_name(dtype))
        if options.check:
            compare(entries, folder, shape, _split(blocks, options.processes), dtype)


def megatron_to_hf(checkpoint: Path, target: Path, model: Path, options: Options) -> None:
    """Writes the model of a distributed checkpoint as a Hugging Face folder, with the checkpoint's
    stop tokens in generation_config.json.

    Args:
        model: folder with config.json and tokenizer.
    """
    shape = read_shape(model)
    with TorchDist(checkpoint) as opened:
        blocks = cut(shape)
        check_checkpoint(opened, shape, blocks)
        held = (
            opened.dtypes[opened.place(b.rule.megatron).key] for b in blocks if not b.rule.float32
        )
        dtype = options.dtype or _only(held, checkpoint)
        blocks = sorted(blocks, key=opened.position)
    total = _bytes(blocks, dtype)
    others = {at.name: torch.float32 for block in blocks if block.rule.float32 for at in block.hf}
    with staging(target, total) as folder:
        entries = create_shards(
            folder, [expected(shape)], dtype, options.shard_bytes, others=others
        )
        parts = [
            HfPart(checkpoint, entries, shape, part) for part in _split(blocks, options.processes)
        ]
        with Progress("convert", total) as progress:
            run_parts(write_part, parts, progress.advance)
        copy_companions(model, folder, dtype_name(dtype))
        add_stops(folder, stops_of(checkpoint))
        if options.check:
            compare(entries, checkpoint, shape, _split(blocks, options.processes), dtype)


def _only(dtypes: Iterable[torch.dtype], where: Path) -> torch.dtype:
    found = set(dtypes)
    if len(found) > 1:
        names = ", ".join(sorted(dtype_name(dtype) for dtype in found))
        raise ConfigError(
            f"the tensors are of several dtypes: {names}",
            where=str(where),
            fix="choose one: --dtype",
        )
    return found.pop()


def _bytes(blocks: Iterable[Block], dtype: torch.dtype) -> int:
    return sum(block.elements * block.dtype(dtype).itemsize for block in blocks)


def _split(blocks: Sequence[Block], processes: int) -> list[list[Block]]:
    """Splits a list of blocks into contiguous parts of similar size, one part for each process.
    Omits parts without blocks, so there can be fewer parts than processes."""
    share = _bytes(blocks, torch.uint8) / processes
    parts: list[list[Block]] = [[] for _ in range(processes)]
    done = 0
    for block in blocks:
        parts[min(int(done / share), processes - 1)].append(block)
        done += block.elements
    return [part for part in parts if part]


@dataclass(frozen=True)
class HfPart:
    """Work of one process in a conversion to a Hugging Face folder. The process reads the rows of
    `blocks` from `checkpoint`, and writes these rows into the tensors of `entries`."""

    checkpoint: Path
    entries: dict[str, Entry]
    shape: ModelShape
    blocks: list[Block]


def write_part(part: HfPart, advance: Advance) -> None:
    """Converts the blocks in `part.blocks`, and writes the blocks into the Hugging Face files. The
    data is on disk when this function returns."""
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


def _copied(
    checkpoint: TorchDist, place: Place, block: Block, part: HfPart, files: OpenFiles
) -> int:
    """Copies a block inside the operating system's kernel (copy_file_range). This copy costs half
    as much as reading the block into this process and writing the block from this process. The copy
    is possible only for a block that is contiguous in the checkpoint and has the same bytes in both
    formats.

    Returns the number of copied bytes. If the copy is not possible, the function copies nothing and
    returns 0.
    """
    (at, *others), entry = block.hf, part.entries[block.hf[0].name]
    if others or DTYPES[entry.dtype] != checkpoint.dtypes[place.key]:
        return 0
    if (found := checkpoint.span(place, block.start, block.stop)) is None:
        return 0
    width = entry.nbytes // entry.shape[0]
    copy_range(
        found[0],
        found[1],
        files[entry.file],
        entry.start + at.start * width,
        (at.stop - at.start) * width,
    )
    return (at.stop - at.start) * width


@dataclass(frozen=True)
class ComparedPart:
    """The blocks that one process compares."""

    entries: dict[str, Entry]
    checkpoint: Path
    shape: ModelShape
    blocks: list[Block]
    dtype: torch.dtype


def compare(
    entries: dict[str, Entry],
    checkpoint: Path,
    shape: ModelShape,
    parts: Sequence[list[Block]],
    dtype: torch.dtype,
) -> None:
    """Checks that every element of the model is the same in the Hugging Face files and the
    checkpoint.

    Args:
        entries: places of the Hugging Face tensors.
        dtype: dtype of the conversion's result. If this dtype is narrower than the source's dtype,
            the source is rounded as in the conversion.

    Raises:
        DataError: a tensor differs. The error names the first such tensor.
    """
    total = sum(_bytes(part, dtype) for part in parts)
    jobs = [ComparedPart(entries, checkpoint, shape, part, dtype) for part in parts]
    with Progress("check", total) as progress:
        different = [
            name for found in run_parts(compare_part, jobs, progress.advance) for name in found
        ]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise DataError(
            f"the two sides differ in {different[0]!r}{more}",
            where=str(checkpoint),
            fix="convert again",
        )


def compare_part(part: ComparedPart, advance: Advance) -> list[str]:
    """Returns the Megatron names of the parameters that differ between the Hugging Face files and
    the checkpoint."""
    different: dict[str, None] = {}
    buffer = Buffer()
    with TorchDist(part.checkpoint, buffer) as checkpoint, OpenFiles(os.O_RDONLY) as files:
        for block in part.blocks:
            buffer.clear()
            found = [part.entries[at.name] for at in block.hf]
            pieces = zip(found, block.hf, strict=True)
            hf = to_megatron(
                block,
                [read_rows(files[e.file], e, at.start, at.stop, buffer) for e, at in pieces],
                part.shape,
            )
            for place in places(block.rule.megatron):
                if place.key in checkpoint.sizes:
                    megatron = checkpoint.rows(place, block.start, block.stop)
                    if not same_bits(hf, megatron, block.dtype(part.dtype)):
                        different[block.rule.megatron] = None
            advance(_bytes([block], part.dtype))
    return list(different)


def same_bits(a: Tensor, b: Tensor, converted: torch.dtype) -> bool:
    """Tells whether two tensors are bitwise equal after conversion to the narrower of the two
    dtypes.

    Args:
        converted: dtype in which the tensors are compared if their two dtypes differ but are
            equally wide.
    """
    if a.dtype != b.dtype:
        narrow = min(a.dtype, b.dtype, key=lambda dtype: (dtype.itemsize, dtype != converted))
        a, b = a.to(narrow), b.to(narrow)
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


class Progress:
    """Context manager that counts bytes and shows progress. The last printed line gives the amount
    of data and the speed.

    Args:
        what: name of the work, like 'convert'.
        total: number of bytes to process.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._started = self._last_line = time.monotonic()
        self._bar: rich.Progress | None = None
        if sys.stderr.isatty():
            columns = (
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.DownloadColumn(),
                rich.TransferSpeedColumn(),
                rich.TimeRemainingColumn(),
            )
            self._bar = rich.Progress(*columns, console=rich.Console(stderr=True), transient=True)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._what, total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            print(self._line(), file=sys.stderr)

    def advance(self, nbytes: int) -> None:
        """Adds `nbytes` to the number of processed bytes."""
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif (now := time.monotonic()) - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-3)
        share = 100 * self._done // max(self._total, 1)
        unit, size = ("GB", 1e9) if self._total >= 1e9 else ("MB", 1e6)
        done, total = self._done / size, self._total / size
        return (
            f"{self._what}: {done:.2f} of {total:.2f} {unit}, {share} %,"
            f" {self._done / seconds / 1e6:.0f} MB/s"
        )
