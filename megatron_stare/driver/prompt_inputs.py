"""What a run's prompts are made with beside its configuration - tokenizer, chat template, system prompt - as digests.

They are saved with the run's state: a file that was replaced since would change what every prompt says, and no error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_stare.config.schema import Config
from megatron_stare.data.prompt_source import PromptSource
from megatron_stare.errors import DataError

FIRST_PROMPT = "first prompt"
CHAT_TEMPLATE = "chat template"
_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


def prompt_inputs(config: Config, tokenizer: Any, source: PromptSource) -> dict[str, str]:
    """SHA-256 by name: of the tokenizer's files, of its chat template where prompts go through one, and of the token
    ids of the stream's first prompt, in which whatever else makes prompts shows: a system prompt of the data, say, or
    another order of it.

    Args:
        source: at its beginning; it is left there.
    """
    folder = Path(config.model.path)
    names = {*_FILES, *getattr(tokenizer, "vocab_files_names", {}).values(), "tokenizer.json"}
    found = {name: _digest((folder / name).read_bytes()) for name in sorted(names) if (folder / name).is_file()}
    if config.data.chat_template:
        found[CHAT_TEMPLATE] = _digest(json.dumps(tokenizer.chat_template).encode())
    before = dict(source.state())
    (prompt,) = source.take(1)
    source.restore(before)
    found[FIRST_PROMPT] = _digest(json.dumps(list(prompt.token_ids)).encode())
    return found


def refuse_other_inputs(saved: Mapping[str, str], now: Mapping[str, str], config: Config) -> None:
    """Raises DataError naming the first that is not what the run was begun with. Releases that saved none say nothing
    of them."""
    for name in sorted(saved.keys() | now.keys() if saved else ()):
        if saved.get(name) == now.get(name):
            continue
        how = "is gone" if name not in now else "is new" if name not in saved else "is another"
        raise DataError(
            f"{name} {how} since the run was begun, so its prompts would not be what they were",
            where=config.model.path,
            fix="put it back as it was (the data too, where the first prompt is another), or start a new run from the "
            "exported policy",
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
