"""Reads a model's folder for rollouts: transformers config, tokens that end a response, and
tokenizer.

Also turns sampled tokens into text. Nothing is looked up on the network.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from megatron_stare.errors import DataError
from megatron_stare.models.shape import ModelShape
from megatron_stare.records.batch import FinishReason
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory
from megatron_stare.rollout.engines.engine import GenerateResult


def read_model_config(model_path: str) -> Any:
    """The folder's transformers config. Raises DataError where there is none: nothing is looked up
    on the network."""
    if not (Path(model_path) / "config.json").is_file():
        raise DataError(
            "no config.json here",
            where=model_path,
            fix="point model.path to a Hugging Face model folder",
        )
    try:
        return AutoConfig.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"config.json does not load: {error}", where=model_path) from error


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Which tokens end a response: ascending union of the end-of-sequence ids of generation config,
    tokenizer and model config, because they disagree in published models.

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
    """Ascending union of what the folder's model and generation configs name; empty where they name
    none.

    Raises:
        DataError: the folder holds no readable model config.
    """
    ids = set(_as_ids(getattr(read_model_config(model_path), "eos_token_id", None)))
    if (Path(model_path) / "generation_config.json").is_file():
        ids |= set(
            _as_ids(
                GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
            )
        )
    return tuple(sorted(ids))


def _as_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises DataError where there is none; nothing is
    downloaded."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the tokenizer: {error}", where=path) from error


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, shape: ModelShape, path: str) -> None:
    """Raises DataError where the tokenizer has ids that the model has no row for, and a lookup
    would end the run."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= shape.vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {largest} ({token!r}), and the model's vocabulary ends at"
            f" {shape.vocab_size - 1} (vocab_size {shape.vocab_size})",
            where=path,
            fix=(
                "put the tokenizer of this model there, or give the model rows for all tokens "
                "(transformers' resize_token_embeddings)"
            ),
        )


def add_text(result: GenerateResult, tokenizer: PreTrainedTokenizerBase) -> None:
    """Fills in the result's text. For where the engine is, not for the driver."""
    result.text = text_of(result.output_ids, result.finish_reason, tokenizer)


def text_of(ids: Tensor, finish_reason: FinishReason, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of tokens [n]: without special tokens and without the stop token. Not every one of
    those is special to its tokenizer, and verifiers read what comes before it."""
    body = ids[:-1] if finish_reason == "stop" else ids
    return tokenizer.decode(body.tolist(), skip_special_tokens=True)


def sampled_text(
    trajectory: Trajectory, stop_token_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """The text of what the policy sampled, and of nothing else, whatever an environment put in
    between: without special tokens and stop tokens, as `text_of`. What was said before and after
    the environment's words stands on lines of its own, so that no answer is made of two halves that
    never stood side by side."""
    parts: list[list[int]] = [[]]
    end = 0
    for version, length in trajectory.versions:
        if version != NOT_SAMPLED:
            parts[-1] += trajectory.tokens[end : end + length].tolist()
        elif parts[-1]:
            parts.append([])
        end += length
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    kept = ([token for token in part if token not in stop_token_ids] for part in parts)
    return "\n".join(tokenizer.decode(part, skip_special_tokens=True) for part in kept)


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of every token, special ones included; end to end they are the text of all. A
    character that several tokens share stands at the last of them, and the others have ""."""
    texts, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        # decoded after the tokens before it, since spaces and bytes of a character depend on those
        known, longer = tokenizer.decode(ids[start:read]), tokenizer.decode(ids[start:end])
        whole = end == len(ids) or (len(longer) > len(known) and not longer.endswith("\ufffd"))
        texts.append(longer[len(known) :] if whole else "")
        if whole:
            start, read = read, end
    return texts
