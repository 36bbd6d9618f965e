"""Reads problems from JSON Lines files, JSON arrays, Parquet files and Hugging Face datasets.
Several row formats are supported.

This project's format is {"prompt": text, "answer": text or number, "id": optional}. In slime's
format, the answer is in "label". In verl's format, "prompt" is a list of messages and the answer is
in "reward_model": {"ground_truth": ...}. For files with other column names, set `data.prompt_key`
and `data.answer_key`.
"""

from __future__ import annotations

import difflib
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_stare.errors import ConfigError, DataError
from megatron_stare.process.interruption import poll

HUB = "hf:"
"""Prefix of a Hugging Face dataset's name: hf:owner/name, hf:owner/name:split or
hf:owner/name:configuration:split."""

PROMPT_KEY = "prompt"
ANSWER_KEYS = ("answer", "label", "reward_model.ground_truth")
# other names that data sets use for these columns
PROMPTS = ("question", "problem", "query", "input", "instruction", "text")
ANSWERS = (
    "solution",
    "target",
    "final_answer",
    "ground_truth",
    "gold",
    "output",
    "expected_answer",
    "answers",
)

Row = tuple[int, str, Any]
Messages = tuple[tuple[str, str], ...]
"""The pair (role, content) for each turn of a conversation."""
Columns = Sequence[str] | Literal["all"]


class Record(NamedTuple):
    """One problem of a file. If the prompt in the file is a text, `messages` is (). If the prompt
    in the file is a list of messages, `messages` contains the list, and `prompt` is the text of its
    last message."""

    id: str
    prompt: str
    answer: str
    where: str  # file:line
    messages: Messages = ()
    columns: Mapping[str, Any] | None = None  # for the verifier; None: none requested


def read_records(
    path: str | Path,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    columns: Columns = (),
) -> tuple[list[Record], int]:
    """Returns the records of a file in order, and a checksum of the file's bytes. Skips blank
    lines.

    Args:
        path: a .parquet file, a .json file with an array, any other file of JSON lines, or the name
            of a dataset (see HUB).
        prompt_key: column of the prompt, dotted if nested; None: PROMPT_KEY.
        answer_key: column of the answer, dotted if nested; None: the first column of ANSWER_KEYS
            that the row has.
        columns: names of further columns to keep, dotted if nested; 'all': the whole row.

    Raises:
        DataError: the file cannot be read, has no record, or has an invalid row. For an invalid row
            the message names file:line and the fault.
        ConfigError: the file needs a library that is not installed.
    """
    name = str(path)
    rows, checksum = read_rows(path)
    records = []
    for n, where, row in rows:
        poll()  # a large file takes minutes
        record = record_of(row, n, where, prompt_key or PROMPT_KEY, answer_key)
        kept = _columns(row, columns, where) if columns else None
        records.append(record._replace(columns=kept))
    if not records:
        raise DataError("the file has no prompts", where=name)
    return records, checksum


def read_rows(path: str | Path) -> tuple[Iterator[Row], int]:
    """Returns an iterator over the rows of a file, and a checksum of the file's bytes. The iterator
    yields every row's number, its place in the file (such as file:line) and its fields.

    Raises:
        The errors of `read_records`. The error for a row that is not JSON is raised when the
        iterator reaches the row.
    """
    name = str(path)
    if name.startswith(HUB):
        return _dataset_rows(name)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the prompts ({error.strerror})", where=name, fix=_nearby(Path(path))
        ) from error
    if name.endswith(".parquet"):
        return _parquet_rows(name), zlib.crc32(content)
    rows = _array_rows(content, name) if name.endswith(".json") else _json_rows(content, name)
    return rows, zlib.crc32(content)


def _nearby(path: Path) -> str:
    """Returns a hint for a file that cannot be read. The hint suggests a file with a similar name,
    or lists the data files of the same folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either"
    files = sorted(
        each.name for each in folder.iterdir() if each.suffix in (".jsonl", ".json", ".parquet")
    )
    if near := difflib.get_close_matches(path.name, files, n=1):
        return f"did you mean {folder / near[0]}?"
    more = f" and {len(files) - 5} more" if len(files) > 5 else ""
    return (
        f"in {folder} there are {', '.join(files[:5])}{more}"
        if files
        else f"there are no prompts in {folder}"
    )


def _json_rows(content: bytes, name: str) -> Iterator[Row]:
    """Yields a tuple of three values for every line that is not blank: the line number, the
    position as the text `file:line`, and the parsed JSON value of the line. Raises DataError for a
    line that is not JSON."""
    # Split as bytes: str.splitlines would also break at U+2028, which JSON strings may contain.
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            where = f"{name}:{number}"
            try:
                yield number, where, json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise DataError(f"not UTF-8 at byte {error.start}", where=where) from error
            except json.JSONDecodeError as error:
                raise DataError(
                    f"not valid JSON at column {error.colno}: {error.msg}", where=where
                ) from error
            # for example, an integer of thousands of digits, or too deeply nested brackets
            except (ValueError, RecursionError) as error:
                raise DataError(f"not readable JSON: {error}", where=where) from error


def _array_rows(content: bytes, name: str) -> Iterator[Row]:
    """Yields the number, the place (file and row) and the value of every element of a JSON array.
    Raises DataError if the file is not a JSON array."""
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"not readable JSON: {error}", where=name) from error
    if not isinstance(found, list):
        raise DataError(f"expected a JSON array of problems, got {_kind(found)}", where=name)
    yield from ((n, f"{name}, row {n}", row) for n, row in enumerate(found, 1))


def _parquet_rows(name: str) -> Iterator[Row]:
    """Yields every row's number (counted from 1), its place (file and row) and its value. Raises
    DataError if the file is not Parquet."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet files are read by pyarrow, which is not installed",
            where=name,
            fix="pip install pyarrow",
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(name) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, f"{name}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"not a readable Parquet file after row {number} ({error})", where=name
        ) from error


def _dataset_rows(name: str) -> tuple[Iterator[Row], int]:
    """Returns the rows of a dataset and a checksum of all rows. Downloads the dataset if it is not
    cached."""
    repository, *parts = name.removeprefix(HUB).split(":")
    split, configuration = (parts or ["train"])[-1], parts[0] if len(parts) > 1 else None
    instead = "give data.path a file of it, .jsonl or .parquet"
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "datasets are fetched by the library 'datasets', which is not installed",
            where=name,
            fix=f"pip install datasets, or {instead}",
        ) from error
    try:
        found = datasets.load_dataset(repository, configuration, split=split)
        checksum = zlib.crc32(b"[")  # that of all rows as one JSON list, a row at a time
        for number, row in enumerate(found):
            poll()
            text = (", " if number else "") + json.dumps(dict(row), sort_keys=True, default=str)
            checksum = zlib.crc32(text.encode(), checksum)
        checksum = zlib.crc32(b"]", checksum)
    # any error of `datasets` and its dependencies: no network, no such name, no access
    except Exception as error:
        raise DataError(
            f"cannot load the dataset: {type(error).__name__}: {error}",
            where=name,
            fix=f"set HF_HUB_OFFLINE=0 where there is a network, or {instead}",
        ) from error
    return ((n, f"{name}, row {n}", dict(row)) for n, row in enumerate(found, 1)), checksum


def record_of(
    fields: Any, number: int, where: str, prompt_key: str, answer_key: str | None
) -> Record:
    """Converts a row to a Record. Raises DataError if a column is missing or has a wrong type."""
    if not isinstance(fields, dict):
        raise DataError(
            f'expected an object like {{"prompt": ..., "answer": ...}}, got {_kind(fields)}',
            where=where,
        )
    keys = (answer_key,) if answer_key else ANSWER_KEYS
    answer_key = next((key for key in keys if _get(fields, key) is not _MISSING), keys[0])
    for key, setting, usual in (
        (prompt_key, "data.prompt_key", PROMPTS),
        (answer_key, "data.answer_key", ANSWERS),
    ):
        if _get(fields, key) is _MISSING:
            named = next((each for each in usual if each in fields), None)
            raise DataError(
                f"no {key!r}; the keys here are {', '.join(map(repr, fields)) or 'none'}",
                where=where,
                fix=f"set {setting}={named}" if named else f"name the right key in {setting}",
            )
    prompt, answer = _get(fields, prompt_key), _get(fields, answer_key)
    messages = _messages(prompt, prompt_key, where) if isinstance(prompt, list) else ()
    if not messages and not isinstance(prompt, str):
        raise DataError(
            f"{prompt_key!r} must be a string, got {_kind(prompt)}",
            where=where,
            fix="give a string, or a list of messages",
        )
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{answer_key!r} must be a string or a number, got {_kind(answer)}", where=where
        )
    if isinstance(answer, float) and not math.isfinite(answer):
        raise DataError(f"{answer_key!r} is not a finite number", where=where)
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # verifiers that compare text expect 27, not 27.0
    name = next(
        (
            v
            for key in ("id", "extra_info.index")
            if (v := _get(fields, key)) not in (_MISSING, None)
        ),
        number,
    )
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise DataError(f"'id' must be a string or an integer, got {_kind(name)}", where=where)
    texts = [(prompt_key, text) for turn in messages for text in turn] or [(prompt_key, prompt)]
    for key, text in (*texts, (answer_key, str(answer)), ("id", str(name))):
        _check_characters(key, text, where)
    return Record(str(name), messages[-1][1] if messages else prompt, str(answer), where, messages)


def _check_characters(key: str, text: str, where: str) -> None:
    """Raises DataError if a text contains half of a surrogate pair, which JSON can express but
    UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(
            f"{key!r} holds {half} at character {error.start}, which is half of a character",
            where=where,
            fix=f"write the whole character, or remove {half}",
        ) from error


def _columns(fields: dict[str, Any], columns: Columns, where: str) -> dict[str, Any]:
    """Returns those columns of a row that are passed to the verifier. Every returned value can be
    written as JSON."""
    found = {}
    for name in fields if columns == "all" else columns:
        value = fields[name] if columns == "all" else _get(fields, name)
        if value is _MISSING:
            raise DataError(
                f"no {name!r}; the keys here are {', '.join(map(repr, fields))}",
                where=where,
                fix="name columns that every row has in data.columns",
            )
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{name!r} cannot be handed to a verifier: {type(value).__name__} is not JSON",
                where=where,
                fix="leave it out of data.columns" + " (name the others)" * (columns == "all"),
            ) from error
        found[name] = value
    return found


def _messages(turns: list[Any], key: str, where: str) -> Messages:
    for turn in turns:
        if not isinstance(turn, dict) or not all(
            isinstance(turn.get(part), str) for part in ("role", "content")
        ):
            raise DataError(
                f'{key!r} must hold messages like {{"role": "user", "content": ...}}', where=where
            )
    if not turns or turns[-1]["role"] != "user":
        raise DataError(
            f"the last message of {key!r} must be the user's: the policy answers it", where=where
        )
    return tuple((turn["role"], turn["content"]) for turn in turns)


_MISSING = object()


def _get(fields: dict[str, Any], key: str) -> Any:
    """Returns the value of a key or dotted key, or `_MISSING` if the row does not have the key."""
    value: Any = fields
    for part in [key] if key in fields else key.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
