"""Which tokens end a response: the union of all places that say so, because they disagree in published models.

Read from the model's folder and the tokenizer; goes into SamplingParams.stop_token_ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from megatron_stare.errors import DataError
from megatron_stare.rollout.model_config import read_model_config


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Ascending union of the end-of-sequence ids of generation config, tokenizer and model config.

    Raises:
        DataError: none of them names one.
    """
    ids = {*model_stop_token_ids(model_path), *_as_ids(getattr(tokenizer, "eos_token_id", None))}
    if not ids:
        raise DataError(
            "neither generation config, tokenizer nor model config names an end-of-sequence token",
            where=model_path,
            fix="set eos_token_id in generation_config.json",
        )
    return tuple(sorted(ids))


def model_stop_token_ids(model_path: str) -> tuple[int, ...]:
    """Ascending union of what the folder's model and generation configs name; empty where they name none.

    Raises:
        DataError: the folder holds no readable model config.
    """
    ids = set(_as_ids(getattr(read_model_config(model_path), "eos_token_id", None)))
    if (Path(model_path) / "generation_config.json").is_file():
        ids |= set(_as_ids(GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id))
    return tuple(sorted(ids))


def _as_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
