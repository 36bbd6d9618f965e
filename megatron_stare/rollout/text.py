"""From sampled tokens to the text that environments and verifiers read. Runs where the engine is, not in the driver."""

from __future__ import annotations

from dataclasses import replace

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_stare.errors import DataError
from megatron_stare.rollout.engine import GenerateResult


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder. Raises DataError where there is none; nothing is downloaded."""
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the tokenizer: {error}", where=path) from error


def with_text(result: GenerateResult, tokenizer: PreTrainedTokenizerBase) -> GenerateResult:
    """The result with its text: without special tokens and without the stop token. Not every one of those is special to
    its tokenizer, and verifiers read what comes before it."""
    body = result.output_ids[:-1] if result.finish_reason == "stop" else result.output_ids
    return replace(result, text=tokenizer.decode(body.tolist(), skip_special_tokens=True))
