"""Finds the columns of a file that contain the prompt and the answer. The module examines only the
first rows of the file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megatron_stare.data.records import (
    ANSWER_KEYS,
    ANSWERS,
    HUB,
    PROMPT_KEY,
    PROMPTS,
    Record,
    Row,
    read_rows,
    record_of,
)
from megatron_stare.errors import DataError, UserError, unknown_name

FORMATS = (".parquet", ".jsonl", ".json")
ROWS = 100  # that are looked at
_PROMPT_KEYS = (PROMPT_KEY, "messages", *PROMPTS)
_ANSWER_KEYS = (*ANSWER_KEYS, *ANSWERS, "extra_info.answer")


class Columns(NamedTuple):
    """Columns of a file.

    `names`: all columns of the first row; a nested column has a dotted name, such as `a.b`.
    `prompt`, `answer`: the chosen columns.
    `records`: one Record for each of the first rows, with the prompt and the answer from the chosen
        columns.
    """

    names: Sequence[str]
    prompt: str
    answer: str
    records: Sequence[Record]


def guess_columns(path: str, prompt: str | None = None, answer: str | None = None) -> Columns:
    """Finds the column that contains the prompts and the column that contains the answers. If the
    caller names a column, uses this column. If the caller names no column, tries usual column names
    in order, and takes the first column whose values have the right type. To find and check the
    columns, the function looks only at the first `ROWS` rows of the file.

    Args:
        path: a file of FORMATS, or the name of a dataset.

    Raises:
        DataError: the file does not exist, has an unknown format or no rows, or no column is
            suitable. If no column is suitable, the message lists the columns of the file.
    """
    if not path.startswith(HUB) and Path(path).suffix not in FORMATS:
        raise DataError(
            f"unknown format {Path(path).suffix or 'without a suffix'!r}",
            where=path,
            fix=f"one of {', '.join(FORMATS)}: Parquet, JSON lines, a JSON array",
        )
    rows = list(islice(read_rows(path)[0], ROWS))
    if not rows:
        raise DataError("the file has no rows", where=path)
    for _, where, row in rows:
        if not isinstance(row, dict):
            raise DataError('expected an object like {"prompt": ..., "answer": ...}', where=where)
    names = list(_names(rows[0][2]))
    for option, given in (("--prompt-key", prompt), ("--answer-key", answer)):
        if given is not None and given not in names:
            raise unknown_name(given, names, option)
    prompt = prompt or _chosen(rows, names, path, "prompt", _PROMPT_KEYS)
    answer = answer or _chosen(rows, names, path, "answer", _ANSWER_KEYS)
    return Columns(names, prompt, answer, _records(rows, prompt, answer))


def _chosen(
    rows: Sequence[Row], names: Sequence[str], path: str, role: str, usual: Sequence[str]
) -> str:
    """Goes through the column names in `usual`, and returns the first column that can be the column
    of prompts (if `role` is 'prompt') or the column of answers (if `role` is 'answer'). The
    comparison of column names ignores case."""
    lower = {name.lower(): name for name in reversed(names)}
    why = ""
    for name in (lower[key] for key in usual if key in lower):
        try:
            _alone(rows, role, name)
        except UserError as error:
            why = why or f" ({error.where}: {error.what})"
            continue
        return name
    raise DataError(
        f"cannot tell which column is the {role}: there are {', '.join(names)}{why}",
        where=path,
        fix=f"--{role}-key COLUMN",
    )


def _alone(rows: Sequence[Row], role: str, name: str) -> None:
    """Checks that the column `name` can be the column of prompts (if `role` is 'prompt') or the
    column of answers (if `role` is 'answer'). Converts every row of `rows` to a Record. A Record
    needs both a prompt and an answer. If `role` is 'prompt', the check uses an empty text as the
    answer. If `role` is 'answer', the check uses an empty text as the prompt. Raises UserError if a
    row cannot be converted."""
    other = "answer" if role == "prompt" else PROMPT_KEY
    for number, where, row in rows:
        fields = {name: _within(row, name), **({} if name == other else {other: ""})}
        keys = (name, other) if role == "prompt" else (other, name)
        record_of(fields, number, where, *keys)


def _records(rows: Sequence[Row], prompt: str, answer: str) -> list[Record]:
    return [record_of(row, number, where, prompt, answer) for number, where, row in rows]


def _names(row: dict[str, Any], above: str = "") -> list[str]:
    """Returns the names of a row's columns. A nested column has a dotted name, such as `a.b`."""
    found = []
    for key, value in row.items():
        found += _names(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]
    return found


def _within(row: dict[str, Any], name: str) -> Any:
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
