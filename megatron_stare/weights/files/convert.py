"""Hugging Face folders to distributed checkpoints of Megatron and back, block by block, in several processes.

A distributed checkpoint does not depend on a layout: what is written here loads at any tensor, pipeline, virtual
pipeline and expert parallelism, and what any layout saved is read. docs/checkpoints.md has the formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_stare.config.layers import read_yaml
from megatron_stare.errors import ConfigError
from megatron_stare.models import read_shape
from megatron_stare.weights.files import torch_dist
from megatron_stare.weights.files.blocks import Block, cut
from megatron_stare.weights.files.check import check_folder, expected
from megatron_stare.weights.files.compare import compare
from megatron_stare.weights.files.convert_progress import Progress
from megatron_stare.weights.files.hf_folder import copy_companions
from megatron_stare.weights.files.hf_shards import SHARD_BYTES, create_shards, dtype_name
from megatron_stare.weights.files.hf_writer import HfPart, write_part
from megatron_stare.weights.files.processes import run_parts
from megatron_stare.weights.files.safetensors_file import DTYPES
from megatron_stare.weights.files.staging import staging
from megatron_stare.weights.files.torch_dist import TorchDist
from megatron_stare.weights.files.torch_dist_check import check_checkpoint
from megatron_stare.weights.files.torch_dist_writer import finish_checkpoint, plan_parts, write_checkpoint_part


@dataclass(frozen=True)
class Options:
    """How to convert.

    Args:
        dtype: of the result; None: that of the source.
        processes: that read, convert and write.
        shard_bytes: a safetensors file's size is at most this, unless one tensor is larger.
        check: read both sides again and compare them.
    """

    dtype: torch.dtype | None = None
    processes: int = 1
    shard_bytes: int = SHARD_BYTES
    check: bool = False


def convert(source: Path, target: Path, model: Path | None, options: Options) -> None:
    """Converts the way that `source` asks for.

    Args:
        model: the Hugging Face folder whose config.json and tokenizer go with a distributed checkpoint that has none.

    Raises:
        UserError: something does not fit, or the disk is full; then there is no `target`.
    """
    if (source / "config.json").exists() and not torch_dist.is_checkpoint(source):
        hf_to_megatron(source, target, options)
    else:
        checkpoint = torch_dist.find(source)
        megatron_to_hf(checkpoint, target, model or companions_of(checkpoint), options)


def companions_of(checkpoint: Path) -> Path:
    """The folder with a checkpoint's config.json and tokenizer: itself, or what its run started from."""
    run_dir = checkpoint.resolve().parent.parent
    recorded = run_dir / "config.yaml"
    started_from = []
    if recorded.exists():
        path = Path(read_yaml(recorded)["model"]["path"])  # the same in every format
        # runs of the first format recorded it as it was given, relative to the folder that most runs lie below
        started_from = [path] if path.is_absolute() else [*(above / path for above in run_dir.parents), path]
    for folder in (checkpoint, *started_from):
        if (folder / "config.json").exists():
            return folder
    raise ConfigError(
        "the checkpoint does not say what model it is",
        where=str(checkpoint),
        fix="name the Hugging Face folder with its config.json and tokenizer: --model HF_DIR",
    )


def hf_to_megatron(source: Path, target: Path, options: Options) -> None:
    """Writes a folder's weights as a distributed checkpoint, with config.json and tokenizer beside them."""
    shape = read_shape(source)
    entries = check_folder(source, shape)
    dtype = options.dtype or _only((DTYPES[entry.dtype] for entry in entries.values()), source)

    def position(block: Block) -> tuple[str, int]:
        entry = entries[block.hf[0].name]
        return str(entry.file), entry.start + block.hf[0].start

    blocks = sorted(cut(shape), key=position)  # read from front to back
    total = _bytes(blocks, dtype)
    with staging(target, total) as folder:
        parts, metadata = plan_parts(folder, _split(blocks, options.processes), entries, shape, dtype)
        with Progress("convert", total) as progress:
            results = run_parts(write_checkpoint_part, parts, progress.advance)
        finish_checkpoint(folder, metadata, results)
        copy_companions(source, folder, dtype_name(dtype))
        if options.check:
            compare(entries, folder, shape, _split(blocks, options.processes), dtype)


def megatron_to_hf(checkpoint: Path, target: Path, model: Path, options: Options) -> None:
    """Writes the model that a distributed checkpoint holds as a Hugging Face folder.

    Args:
        model: the folder with config.json and tokenizer.
    """
    shape = read_shape(model)
    with TorchDist(checkpoint) as opened:
        blocks = cut(shape)
        check_checkpoint(opened, shape, blocks)
        held = (opened.dtypes[opened.place(block.rule.megatron).key] for block in blocks)
        dtype = options.dtype or _only(held, checkpoint)
        blocks = sorted(blocks, key=opened.position)
    total = _bytes(blocks, dtype)
    with staging(target, total) as folder:
        entries = create_shards(folder, [expected(shape)], dtype, options.shard_bytes)
        parts = [HfPart(checkpoint, entries, shape, part) for part in _split(blocks, options.processes)]
        with Progress("convert", total) as progress:
            run_parts(write_part, parts, progress.advance)
        copy_companions(model, folder, dtype_name(dtype))
        if options.check:
            compare(entries, checkpoint, shape, _split(blocks, options.processes), dtype)


def _only(dtypes: Iterable[torch.dtype], where: Path) -> torch.dtype:
    found = set(dtypes)
    if len(found) > 1:
        names = ", ".join(sorted(dtype_name(dtype) for dtype in found))
        raise ConfigError(f"the tensors are of several dtypes: {names}", where=str(where), fix="choose one: --dtype")
    return found.pop()


def _bytes(blocks: Iterable[Block], dtype: torch.dtype) -> int:
    return sum(block.elements for block in blocks) * dtype.itemsize


def _split(blocks: Sequence[Block], processes: int) -> list[list[Block]]:
    """As many stretches of like size as there are processes, or fewer if there are not so many blocks."""
    share = _bytes(blocks, torch.uint8) / processes
    parts: list[list[Block]] = [[] for _ in range(processes)]
    done = 0
    for block in blocks:
        parts[min(int(done / share), processes - 1)].append(block)
        done += block.elements
    return [part for part in parts if part]
