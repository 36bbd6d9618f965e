"""Reads and writes Hugging Face folders tensor by tensor, so that no one needs to hold a whole model twice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_stare.errors import DataError
from megatron_stare.weights.safetensors_file import read_header

# what a folder holds besides weights, carried along when a policy is written
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
_INDEX = "model.safetensors.index.json"


def locate(path: Path) -> dict[str, Path]:
    """The file of every tensor of a Hugging Face folder, by name.

    Raises:
        DataError: no safetensors, an index that cannot be read, or a file that it names and that is not there.
    """
    index, single = path / _INDEX, path / "model.safetensors"
    if index.exists():
        try:
            weights: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"the index cannot be read: {error!r}", where=str(index), fix="copy it again") from error
        for file in sorted(set(weights.values())):
            if not (path / file).exists():
                raise DataError(
                    f"the index names {file}, which is not there", where=str(path), fix="download or copy the file"
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
    """The weights of a Hugging Face folder, by name, read slice by slice from safetensors."""

    def __init__(self, path: str | Path) -> None:
        """Raises DataError where there are no readable safetensors."""
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
        """A lazily read tensor: indexing it reads just that part."""
        if name not in self._where:
            raise DataError(f"the tensor {name!r} is missing", where=str(self.path))
        try:
            return self._open(self._where[name]).get_slice(name)
        except SafetensorError as error:
            raise DataError(f"{self._where[name].name} does not hold {name!r}", where=str(self.path)) from error


def write_folder(
    path: str | Path, tensors: Mapping[str, Tensor], companions_from: str | Path, step: int | None = None
) -> None:
    """Writes a folder that `transformers` loads: weights of one dtype, and config and tokenizer of `companions_from`;
    config.json is made to say the dtype, which `transformers` loads them in.

    It is written beside its place and moved there whole, so a killed write leaves nothing that looks complete.

    Args:
        step: of the run whose policy it is, for `exported_step`.
    """
    path, source = Path(path), Path(companions_from)
    staging = path.with_name(path.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    copy_companions(source, staging, str(next(iter(tensors.values())).dtype).removeprefix("torch."))
    metadata = {"format": "pt"} | ({} if step is None else {"step": str(step)})
    save_file({name: t.contiguous() for name, t in tensors.items()}, staging / "model.safetensors", metadata)
    shutil.rmtree(path, ignore_errors=True)
    staging.rename(path)


def exported_step(path: Path) -> int | None:
    """The step that `write_folder` was told; None where it was not, or where there is no such folder."""
    try:
        with safe_open(path / "model.safetensors", framework="pt") as file:
            step = (file.metadata() or {}).get("step")
    except (OSError, SafetensorError):
        return None
    return None if step is None else int(step)


def copy_companions(source: Path, target: Path, dtype: str | None = None) -> None:
    """Carries config, tokenizer and chat template along.

    Args:
        dtype: what config.json is made to say of the weights, like 'bfloat16'; None: what it says.
    """
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if dtype is not None:
        config = json.loads((target / "config.json").read_text())
        key = "torch_dtype" if "torch_dtype" in config else "dtype"  # its name before transformers 5
        if config.get(key) != dtype:
            (target / "config.json").write_text(json.dumps({**config, key: dtype}, indent=2) + "\n")
