"""Reads Hugging Face folders tensor by tensor, so that no one needs to hold a whole model twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron_stare.errors import DataError
from megatron_stare.weights.files.safetensors_file import read_header

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
INDEX = "model.safetensors.index.json"


def locate(path: Path) -> dict[str, Path]:
    """The file of every tensor of a Hugging Face folder, by name.

    Raises:
        DataError: no safetensors, an index that cannot be read, or a file that it names and that is not there.
    """
    index, single = path / INDEX, path / "model.safetensors"
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


def exported_step(path: Path) -> int | None:
    """The step that a folder was written with; None where there was none, or where there is no such folder."""
    try:
        with safe_open(next(iter(locate(path).values())), framework="pt") as file:
            step = (file.metadata() or {}).get("step")
    except (OSError, SafetensorError, DataError):
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
