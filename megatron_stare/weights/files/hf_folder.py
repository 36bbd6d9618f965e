"""Reads and writes Hugging Face folders. Tensors are read one at a time, so that no process holds a
whole model twice.

A folder is written in two steps. One process creates all files at their final size, with headers
and index. Each process then writes its own tensors into the files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.weights.files.open_files import OpenFiles
from megatron_stare.weights.files.safetensors_file import Entry, lay_out, read_header, write_rows
from megatron_stare.weights.files.staging import staging

# files besides weights, copied along when a policy is written
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30  # largest size of a file, unless one tensor is larger

Shapes = Mapping[str, tuple[int, ...]]  # by tensor name


def locate(path: Path) -> dict[str, Path]:
    """Returns a dict that maps the name of each tensor in a Hugging Face folder to the file that
    holds the tensor.

    Raises:
        DataError: the folder has no safetensors files, the index cannot be read, or a file that the
            index names is missing.
    """
    index, single = path / INDEX, path / "model.safetensors"
    if index.exists():
        try:
            weights: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"the index cannot be read: {error!r}", where=str(index), fix="copy it again"
            ) from error
        for file in sorted(set(weights.values())):
            if not (path / file).exists():
                raise DataError(
                    f"the index names {file}, which is not there",
                    where=str(path),
                    fix="download or copy the file",
                )
        return {name: path / file for name, file in weights.items()}
    if not single.exists():
        raise DataError(
            "no model.safetensors and no model.safetensors.index.json",
            where=str(path),
            fix="save the model with save_pretrained(..., safe_serialization=True)",
        )
    return dict.fromkeys(read_header(single), single)


class HfFolder:
    """Weights of a Hugging Face folder, accessed by tensor name. The weights are read slice by
    slice from safetensors files."""

    def __init__(self, path: str | Path) -> None:
        """Raises DataError if the folder has no readable safetensors files."""
        self.path = Path(path)
        self._files: dict[str, Any] = {}
        self._where = locate(self.path)

    def _open(self, file: Path) -> Any:
        if str(file) not in self._files:
            try:
                self._files[str(file)] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(f"cannot read the weights: {error}", where=str(file)) from error
        return self._files[str(file)]

    def names(self) -> set[str]:
        return set(self._where)

    def slice(self, name: str) -> Any:
        """Returns a tensor that is read lazily. Indexing the tensor reads only the indexed part."""
        if name not in self._where:
            raise DataError(f"the tensor {name!r} is missing", where=str(self.path))
        try:
            return self._open(self._where[name]).get_slice(name)
        except SafetensorError as error:
            raise DataError(
                f"{self._where[name].name} does not hold {name!r}", where=str(self.path)
            ) from error


def exported_step(path: Path) -> int | None:
    """Returns the step that is recorded in a folder's weight files. Returns None if no step is
    recorded, or if the weights are missing or unreadable."""
    try:
        with safe_open(next(iter(locate(path).values())), framework="pt") as file:
            step = (file.metadata() or {}).get("step")
    except (OSError, SafetensorError, DataError):
        return None
    return None if step is None else int(step)


def copy_companions(source: Path, target: Path, dtype: str | None = None) -> None:
    """Copies config, tokenizer and chat template. Also copies the folder's Python files if an
    `auto_map` in config.json or tokenizer_config.json names modules.

    Args:
        dtype: dtype to write into config.json, like 'bfloat16'. None leaves the dtype in
            config.json as it is.
    """
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if any(_has_auto_map(source / name) for name in ("config.json", "tokenizer_config.json")):
        for module in source.glob("*.py"):  # all, since the named modules import others
            shutil.copyfile(module, target / module.name)
    if dtype is not None:
        config = json.loads((target / "config.json").read_text())
        # torch_dtype: the key's name before transformers 5, which reads dtype if both are there
        keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
        named = config | dict.fromkeys(keys, dtype)
        if named != config:
            (target / "config.json").write_text(json.dumps(named, indent=2) + "\n")


def _has_auto_map(file: Path) -> bool:
    return file.exists() and b'"auto_map"' in file.read_bytes()


def add_stops(folder: Path, ids: Collection[int]) -> None:
    """Adds the end-of-response tokens `ids` to the list `eos_token_id` of generation_config.json.
    If generation_config.json has no key `eos_token_id`, the new list begins with the end tokens of
    config.json."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    config = json.loads((folder / "config.json").read_text())
    known = generation.get("eos_token_id", config.get("eos_token_id"))
    stops = known if isinstance(known, list) else [] if known is None else [known]
    if new := sorted(set(ids) - set(stops)):
        path.write_text(json.dumps({**generation, "eos_token_id": [*stops, *new]}, indent=2) + "\n")


def create_shards(
    folder: Path,
    parts: Sequence[Shapes],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    step: int | None = None,
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> dict[str, Entry]:
    """Creates the folder's weight files with headers and index, and reserves the disk space of all
    tensors.

    Args:
        parts: shapes by tensor name, one mapping for each process that fills files. No file
            contains tensors of two processes.
        step: training step of the policy. `exported_step` reads the step from the files.
        others: dtypes of the tensors whose dtype differs from `dtype`.

    Returns the place of each tensor. Raises OSError if the disk is full.
    """
    shards = [shard for part in parts for shard in _cut(part, dtype, shard_bytes, others)]
    entries: dict[str, Entry] = {}
    for number, tensors in enumerate(shards, 1):
        single = len(shards) == 1
        file = folder / (
            "model.safetensors"
            if single
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        header, placed = lay_out(
            file, tensors, dtype, {} if step is None else {"step": str(step)}, others
        )
        end = max(entry.start + entry.nbytes for entry in placed.values())
        with file.open("wb") as stream:
            stream.write(header)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, end)  # a full disk fails now, not half way
        entries |= placed
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries.values())},
            "weight_map": {name: entry.file.name for name, entry in entries.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return entries


def _cut(
    tensors: Shapes, dtype: torch.dtype, shard_bytes: int, others: Mapping[str, torch.dtype]
) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = []
    size = 0
    for name, shape in tensors.items():
        nbytes = math.prod(shape) * others.get(name, dtype).itemsize
        if not shards or size + nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    return shards


def fill(entries: Mapping[str, Entry], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Writes complete tensors into their files. The data is on disk when this function returns.
    Raises OSError if a write fails."""
    with OpenFiles(os.O_WRONLY) as files:
        for name, tensor in tensors:
            entry = entries[name]
            write_rows(files[entry.file], entry, 0, tensor.cpu().contiguous())
        files.sync()


def main_dtype(dtypes: Mapping[str, torch.dtype]) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    """Returns the most frequent dtype of a model's tensors. Also returns a dict that maps tensor
    names to dtypes. The dict contains every tensor that does not have the most frequent dtype."""
    main = Counter(dtypes.values()).most_common(1)[0][0]
    return main, {name: dtype for name, dtype in dtypes.items() if dtype != main}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as config.json spells it."""
    return str(dtype).removeprefix("torch.")


def write_folder(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    companions_from: str | Path,
    step: int | None = None,
) -> None:
    """Writes a folder that `transformers` can load. The folder contains the weights, the config and
    the tokenizer. The config and the tokenizer are copied from the folder `companions_from`.

    The folder's config.json names the most frequent dtype of the weights. `transformers` loads all
    weights in the dtype that config.json names. An existing folder is replaced only after the new
    folder is complete.

    Raises:
        UserError: the folder cannot be written.
    """
    dtype, others = main_dtype({name: tensor.dtype for name, tensor in tensors.items()})
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    with staging(Path(path), nbytes, replace=True) as folder:
        fill(create_shards(folder, [shapes], dtype, step=step, others=others), tensors.items())
        copy_companions(Path(companions_from), folder, dtype_name(dtype))
