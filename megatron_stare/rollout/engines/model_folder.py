"""Reads the transformers config, the stop tokens and the tokenizer from a model's folder, and
decodes sampled tokens to text. Never accesses the network."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from megatron_stare.errors import DataError
from megatron_stare.models.shape import ModelShape
from megatron_stare.records.batch import FinishReason
from megatron_stare.records.trajectory import NOT_SAMPLED, Trajectory, runs_between
from megatron_stare.rollout.engines.engine import GenerateResult

_PROBE = "What is 31*1234?\nIt's 6 + 5."  # tokenizers split its numbers and words differently
_LONG_RUN = 8  # tokens; twice the tokens that a character takes at most
# raised by transformers for a file with invalid JSON, or with a field missing or of a wrong type
_INVALID = (OSError, ValueError, TypeError, LookupError, StrictDataclassError)


def read_model_config(model_path: str) -> Any:
    """Returns the folder's transformers config. Raises DataError if config.json is missing from the
    folder or cannot be loaded."""
    if not (Path(model_path) / "config.json").is_file():
        raise DataError(
            "no config.json here",
            where=model_path,
            fix="point model.path to a Hugging Face model folder",
        )
    try:
        return AutoConfig.from_pretrained(model_path, local_files_only=True)
    except _INVALID as error:
        raise _not_loaded("config.json", error, model_path) from error


def stop_token_ids(model_path: str, tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a response, in ascending order. The result is the
    union of the end-of-sequence ids in the generation config, the tokenizer and the model config.
    The function returns the union because, in some published models, the generation config, the
    tokenizer and the model config name different end-of-sequence ids.

    Raises:
        DataError: none of the three sources names an end-of-sequence id.
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
    """Returns all end-of-sequence ids in the folder's model config and generation config, in
    ascending order. The result may be empty.

    Raises:
        DataError: the folder has no readable model config, or its generation config is invalid.
    """
    ids = set(_as_ids(getattr(read_model_config(model_path), "eos_token_id", None)))
    if (Path(model_path) / "generation_config.json").is_file():
        try:
            found = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
        except _INVALID as error:
            raise _not_loaded("generation_config.json", error, model_path) from error
        if not all(isinstance(id, int) for id in _as_ids(found)):
            raise DataError(
                f"eos_token_id {found!r} in generation_config.json is not a token id",
                where=model_path,
                fix="write the id as a number, or several ids as a list of numbers",
            )
        ids |= set(_as_ids(found))
    return tuple(sorted(ids))


def _not_loaded(what: str, error: Exception, path: str) -> DataError:
    said = " ".join(str(error).split())  # some messages have several lines
    return DataError(
        f"{what} does not load: {said}",
        where=path,
        fix="correct the file, or download it again",
    )


def _as_ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


class _OneDay(datetime):
    """The clock of chat templates. Llama-3 and Mistral-Small 3 write the date into the system
    message, so without a fixed date a run that is resumed on another day would have other
    prompts."""

    @classmethod
    def now(cls, tz: Any = None) -> Self:
        """Returns 26 July 2024, the date that Llama's chat templates write if they cannot look up
        today's date."""
        return cls(2024, 7, 26, tzinfo=tz)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a Hugging Face folder. Downloads nothing. After the first call of
    `load_tokenizer`, all chat templates of this process write 26 July 2024 as today's date.

    Raises:
        DataError: the folder's tokenizer cannot be loaded, has no vocabulary, or encodes text
            differently from the folder's tokenizer.json.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except _INVALID as error:
        raise _not_loaded("the tokenizer, or config.json beside it,", error, path) from error
    _check_encoding(tokenizer, path)
    chat_template_utils.datetime = _OneDay
    return tokenizer


def _check_encoding(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raises DataError if the tokenizer has no vocabulary, or encodes text differently from the
    folder's tokenizer.json. The library `transformers` raises no error when it loads a tokenizer
    that has no vocabulary, or that encodes text differently from tokenizer.json."""
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    if not ids and tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        raise DataError(
            "the tokenizer has special tokens, but no vocabulary",
            where=path,
            fix="download this model's tokenizer.json, or vocab.json and merges.txt",
        )
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return
    own = Tokenizer.from_file(str(file))
    own.no_padding()
    own.no_truncation()
    # a small vocabulary lacks parts of the text, which classes leave out or encode as unknown
    unknown = own.token_to_id(getattr(own.model, "unk_token", None) or "")
    found = own.encode(_PROBE, add_special_tokens=False).ids
    if [id for id in found if id != unknown] != [id for id in ids if id != unknown]:
        raise DataError(
            f"{type(tokenizer).__name__}, which transformers loads here, encodes text differently"
            " from tokenizer.json",
            where=path,
            fix=(
                "set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json;"
                " transformers ignores this setting for qwen2, which needs Qwen2's tokenizer.json"
            ),
        )


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, shape: ModelShape, path: str) -> None:
    """Raises DataError if the tokenizer has token ids for which the model has no embedding row.
    Without this check, the run would crash when the model looks up an embedding row that does not
    exist."""
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
    """Fills in the result's text. Runs in the engine's worker, not in the driver."""
    result.text = text_of(result.output_ids, result.finish_reason, tokenizer)


def text_of(ids: Tensor, finish_reason: FinishReason, tokenizer: PreTrainedTokenizerBase) -> str:
    """Decodes tokens [n] to text, and leaves out special tokens and the stop token. Some tokenizers
    do not treat their stop token as special, and verifiers must not see the stop token."""
    body = ids[:-1] if finish_reason == "stop" else ids
    return tokenizer.decode(body.tolist(), skip_special_tokens=True)


def sampled_text(
    trajectory: Trajectory, stop_token_ids: Collection[int], tokenizer: PreTrainedTokenizerBase
) -> str:
    """Decodes the tokens that the policy sampled. Leaves out special tokens, stop tokens, and all
    tokens that the environment wrote. Inserts a newline character wherever environment tokens or
    the start of a branch interrupt the policy's text. The newline character separates the text
    before the interruption from the text after the interruption. Without the newline character, the
    text before and the text after the interruption could together look like an answer that the
    policy never wrote."""
    parts: list[list[int]] = [[]]
    for at, last in trajectory.spans:
        if parts[-1]:
            parts.append([])
        for version, length in runs_between(trajectory.versions, at, last):
            if version != NOT_SAMPLED:
                parts[-1] += trajectory.tokens[at : at + length].tolist()
            elif parts[-1]:
                parts.append([])
            at += length
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    kept = ([token for token in part if token not in stop_token_ids] for part in parts)
    return "\n".join(tokenizer.decode(part, skip_special_tokens=True) for part in kept)


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the text of every token, including special tokens. The concatenated texts of all
    tokens are the text of the sequence. If several tokens together encode one character, the last
    of these tokens gets the character, and the other tokens get "". There is one exception. After 8
    or more consecutive tokens with the text "", the function no longer decodes the text at every
    token. A token that completes a character can then get "", and a later token gets the character
    instead."""
    texts, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        held = end - read
        # Decoding a long run again at each of its tokens would take quadratic time. Within a long
        # run, only lengths that are powers of two, and tokens with text of their own, are decoded.
        if held > _LONG_RUN and held & (held - 1) and end < len(ids):
            alone = tokenizer.decode(ids[end - 1 : end])
            if not alone or alone.endswith("\ufffd"):
                texts.append("")
                continue
        # decoded together with the tokens before it, on which spaces and split characters depend
        known, longer = tokenizer.decode(ids[start:read]), tokenizer.decode(ids[start:end])
        whole = end == len(ids) or (len(longer) > len(known) and not longer.endswith("\ufffd"))
        texts.append(longer[len(known) :] if whole else "")
        if whole:
            start, read = read, end
    return texts
