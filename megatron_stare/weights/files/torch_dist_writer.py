"""Writes a distributed checkpoint from a Hugging Face folder, with torch.distributed.checkpoint's
own writer.

The writer requests each tensor just before writing the tensor. Each tensor is read from the Hugging
Face folder only when the writer requests the tensor.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    WriteItem,
)
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megatron_stare.models.shape import ModelShape
from megatron_stare.weights.files.blocks import Block, Place, to_megatron, written_places
from megatron_stare.weights.files.open_files import OpenFiles
from megatron_stare.weights.files.processes import Advance
from megatron_stare.weights.files.safetensors_file import Entry, read_rows


@dataclass(frozen=True)
class MegatronPart:
    """Work of one process in a conversion to a distributed checkpoint. The process reads the
    Hugging Face tensors of `entries`, and writes the items of `plan` into `folder`."""

    folder: Path
    plan: SavePlan
    blocks: dict[MetadataIndex, Block]
    entries: dict[str, Entry]
    shape: ModelShape
    dtype: torch.dtype


def plan_parts(
    folder: Path,
    blocks: Sequence[list[Block]],
    entries: dict[str, Entry],
    shape: ModelShape,
    dtype: torch.dtype,
) -> tuple[list[MegatronPart], Metadata]:
    """Plans the part of the checkpoint that each process writes. Each list in `blocks` contains the
    blocks of one process. Also makes the metadata of the whole checkpoint."""
    items = [
        [
            (_item(block, place, shape, dtype), block)
            for block in part
            for place in written_places(block.rule.megatron, shape)
        ]
        for part in blocks
    ]
    plans = [SavePlan([item for item, _ in part]) for part in items]
    plans[0].items.extend(
        WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in _extra_states(blocks, shape)
    )
    plans, metadata = create_default_global_save_plan(plans)
    plans = _writer(folder).prepare_global_plan(plans)
    parts = [
        MegatronPart(
            folder, plan, {item.index: block for item, block in part}, entries, shape, dtype
        )
        for plan, part in zip(plans, items, strict=True)
    ]
    return parts, metadata


def _extra_states(blocks: Sequence[list[Block]], shape: ModelShape) -> list[str]:
    """Returns the keys of the extra states of Megatron's linear layers. Megatron's linear layers
    save extra states beside the weights, and cannot be loaded without extra states. Transformer
    Engine stores scaling factors in the extra states. The extra states written here are empty."""
    keys: dict[str, None] = {}  # in order
    for rule in (block.rule for part in blocks for block in part):
        if rule.layout in _LINEAR and rule.megatron.endswith(".weight"):
            place = written_places(rule.megatron, shape)[0]
            at, of = (
                ".".join(map(str, numbers))
                for numbers in (place.lead or (0,), _counts(place, shape) or (1,))
            )
            keys[f"{place.key.removesuffix('weight')}_extra_state/shard_{at}_{of}"] = None
    return list(keys)


_LINEAR = ("qkv", "gated", "row", "column")


def _counts(place: Place, shape: ModelShape) -> tuple[int, ...]:
    return tuple(shape.experts if what == "experts" else shape.layers for what in place.dims)


def _item(block: Block, place: Place, shape: ModelShape, dtype: torch.dtype) -> WriteItem:
    counts, columns = _counts(place, shape), block.size[1:]
    offsets = torch.Size((*place.lead, block.start, *(0 for _ in columns)))
    sizes = torch.Size((*(1 for _ in counts), block.stop - block.start, *columns))
    chunk = ChunkStorageMetadata(offsets, sizes)
    data = TensorWriteData(
        chunk, TensorProperties(dtype=block.dtype(dtype)), torch.Size((*counts, *block.size))
    )
    return WriteItem(MetadataIndex(place.key, offsets), WriteItemType.SHARD, tensor_data=data)


class _Planner(DefaultSavePlanner):
    """Gives the writer each block or extra state that the writer requests."""

    def __init__(self, part: MegatronPart, files: OpenFiles, advance: Advance) -> None:
        super().__init__(flatten_state_dict=False)
        self._part, self._files, self._advance = part, files, advance

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            torch.save([None], nothing := io.BytesIO())
            return nothing
        part, block = self._part, self._part.blocks[write_item.index]
        rows = [
            read_rows(
                self._files[part.entries[at.name].file], part.entries[at.name], at.start, at.stop
            )
            for at in block.hf
        ]
        tensor = to_megatron(block, rows, part.shape).to(block.dtype(part.dtype))
        self._advance(tensor.nbytes)
        assert write_item.tensor_data is not None
        return tensor.view(write_item.tensor_data.chunk.sizes)


def write_checkpoint_part(part: MegatronPart, advance: Advance) -> list[WriteResult]:
    """Converts the blocks of a part and writes the blocks into a file. The file is on disk when
    this function returns."""
    with OpenFiles(os.O_RDONLY) as files:
        try:
            return (
                _writer(part.folder).write_data(part.plan, _Planner(part, files, advance)).value()
            )
        # raised when torch.save closes its archive after a failed write
        except RuntimeError as error:
            raise _first(error) from error


def _first(error: BaseException) -> BaseException:
    """Follows the attribute `__context__` from `error` back to the error that was raised first.
    Returns this first error."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def finish_checkpoint(folder: Path, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Writes the metadata files that a megatron-core checkpoint of step 0 needs beside its tensor
    files. Megatron-LM can also load the completed checkpoint."""
    _writer(folder).finish(metadata, results)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {"sharded_backend_version": 1, "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(backends | versions))


def _writer(folder: Path) -> FileSystemWriter:
    # 0, because copying ahead only helps tensors on a GPU
    return FileSystemWriter(folder, per_thread_copy_ahead=0)
