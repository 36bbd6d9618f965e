"""Reads the transformers config of a model folder, for the engine that is built from it and for its stop tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from megatron_stare.errors import DataError


def read_model_config(model_path: str) -> Any:
    """The folder's transformers config. Raises DataError where there is none: nothing is looked up on the network."""
    if not (Path(model_path) / "config.json").is_file():
        raise DataError("no config.json here", where=model_path, fix="point model.path to a Hugging Face model folder")
    try:
        return AutoConfig.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"config.json does not load: {error}", where=model_path) from error
