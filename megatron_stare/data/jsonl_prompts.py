"""Prompts from a JSON Lines file: one {"prompt": str, "answer": str or number, "id": str or integer, optional} a line.

The whole file is read and checked once, when the source is built; `data.path` feeds training, `data.eval_path`
evaluation, which passes over lines that repeat an earlier one's prompt and answer. Every epoch has its own order, a
function of seed and epoch alone, so the cursor is all the state there is.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.batch import Prompt
from megatron_stare.config.schema import Config
from megatron_stare.data.encode import PromptEncoder, PromptTooLongError
from megatron_stare.data.streams import Split, counter_hash, stream_seed
from megatron_stare.errors import ConfigError, DataError


class Record(NamedTuple):
    """One line of the file."""

    id: str
    prompt: str
    answer: str
    where: str  # file:line


class JsonlPrompts:
    """A PromptSource over a file, shuffled anew every epoch.

    Args:
        config: of the run.
        tokenizer: a transformers tokenizer.
        split: 'train' reads `data.path`, 'eval' reads `data.eval_path`.

    Raises:
        ConfigError: the split's path is not set.
        DataError: the file is missing, empty or broken, or a prompt is too long; names file, line and what is wrong.
    """

    def __init__(self, config: Config, tokenizer: Any, split: Split) -> None:
        key = "path" if split == "train" else "eval_path"
        path = getattr(config.data, key)
        if path is None:
            raise ConfigError("the source 'jsonl' needs a file", where=f"data.{key}", fix=f"data.{key}=prompts.jsonl")
        self._path = path
        self._records, self._checksum = read_records(path)
        self._encode = PromptEncoder(config, tokenizer)
        # only checked here and encoded again when taken: the ids of a large file would outweigh its text tenfold
        drop = config.rollout.truncate_prompt == "drop"
        self._records = [record for record in self._records if self._fits(record, drop)]
        if not self._records:
            raise DataError("every prompt is longer than rollout.max_prompt_tokens", where=path)
        if split == "eval":  # asked twice, a problem would count as two; in training that may be what is wanted
            self._records = self._without_repeats()
        self.problems = len(self._records)
        self._seed = stream_seed(config.run.seed, split)
        self._cursor = 0
        self._epoch = 0
        self._order = self._shuffled(0)

    def _fits(self, record: Record, drop: bool) -> bool:
        """Whether the prompt can be taken; one that is too long is dropped, or an error."""
        try:
            self._encode(record.prompt, record.where)
        except PromptTooLongError:
            if not drop:
                raise
            return False
        return True

    def _without_repeats(self) -> list[Record]:
        """The first of all records that are the same prompt, as the policy sees it, with the same answer."""
        first: dict[tuple[tuple[int, ...], str], Record] = {}
        for record in self._records:
            first.setdefault((self._encode(record.prompt, record.where), record.answer), record)
        return list(first.values())

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, across as many epochs as that takes."""
        return [self._next() for _ in range(n)]

    def state(self) -> dict[str, int]:
        """Prompts taken since the run began, and the checksum of the file they came from."""
        return {"cursor": self._cursor, "checksum": self._checksum}

    def restore(self, state: dict[str, int]) -> None:
        """Goes on after prompt `state["cursor"]`. Raises DataError if the file is another one than then."""
        if state.get("checksum") != self._checksum:
            raise DataError(
                "the file is not the one this run was started with, so it cannot be continued exactly",
                where=self._path,
                fix="put the original file back, or start a new run",
            )
        self._cursor = state["cursor"]

    def _next(self) -> Prompt:
        epoch, index = divmod(self._cursor, len(self._records))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        record = self._records[self._order[index]]
        prompt = Prompt(
            cursor=self._cursor,
            id=record.id,
            text=record.prompt,
            answer=record.answer,
            token_ids=self._encode(record.prompt, record.where),
        )
        self._cursor += 1
        return prompt

    def _shuffled(self, epoch: int) -> list[int]:
        return sorted(range(len(self._records)), key=lambda line: counter_hash(self._seed, epoch, line))


def read_records(path: str | Path) -> tuple[list[Record], int]:
    """The records of a file in its order, blank lines skipped, and a checksum of its bytes.

    Raises:
        DataError: the file cannot be read, has no record, or has a broken line (file:line, and what is wrong).
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the prompts ({error.strerror})", where=str(path)) from error
    records = [
        _record(line, number, f"{path}:{number}")
        # Split as bytes: str.splitlines would also break at U+2028, which JSON strings may contain.
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        if line.strip()
    ]
    if not records:
        raise DataError("the file has no prompts", where=str(path))
    return records, zlib.crc32(content)


def _record(line: bytes, number: int, where: str) -> Record:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8 at byte {error.start}", where=where) from error
    except json.JSONDecodeError as error:
        raise DataError(f"not valid JSON at column {error.colno}: {error.msg}", where=where) from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets without end
        raise DataError(f"not readable JSON: {error}", where=where) from error
    if not isinstance(fields, dict):
        raise DataError(f'expected an object like {{"prompt": ..., "answer": ...}}, got {_kind(fields)}', where=where)
    for key in ("prompt", "answer"):
        if key not in fields:
            raise DataError(f"no {key!r}; the keys here are {', '.join(map(repr, fields)) or 'none'}", where=where)
    prompt, answer, name = fields["prompt"], fields["answer"], fields.get("id", number)
    if not isinstance(prompt, str):
        raise DataError(f"'prompt' must be a string, got {_kind(prompt)}", where=where)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(f"'answer' must be a string or a number, got {_kind(answer)}", where=where)
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError("'answer' is not a finite number", where=where)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise DataError(f"'id' must be a string or an integer, got {_kind(name)}", where=where)
    return Record(str(name), prompt, str(answer), where)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
