"""Reads and writes JSON Lines files that stay readable after kill -9. Readers drop an incomplete
last line. A run that resumes from a step can remove the records of later steps from the files.

`sinks/jsonl_files.py` writes and reads a run's JSON Lines files. The report also reads a run's JSON
Lines files. This module only assumes that each record has an integer under "step".
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_stare.errors import DataError

Record = dict[str, Any]


def to_line(record: Mapping[str, Any]) -> str:
    """Returns the record as one line of strict JSON, including the newline. Writes NaN and
    infinities, which JSON lacks, as null. Writes characters as they are. If the record contains
    half of a surrogate pair, which UTF-8 cannot encode, writes all non-ASCII characters as
    escapes."""
    line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    if line.isascii() or line.encode(errors="replace").decode() == line:
        return line
    return json.dumps(finite(record), allow_nan=False) + "\n"


def read_jsonl(path: Path) -> list[Record]:
    """Reads the records of `path`, oldest first. Returns [] if the file does not exist. Drops an
    incomplete last line.

    Raises:
        DataError: a line other than an incomplete last line is not a JSON object. A killed process
            leaves no such line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:  # bad JSON, or UTF-8 cut in the middle of a character
            if number == len(lines):
                break
            raise DataError(
                "this line is not JSON", where=f"{path}:{number}", fix="delete the line"
            ) from error
        if not isinstance(record, dict):
            raise DataError(
                "this line is not a JSON object", where=f"{path}:{number}", fix="delete the line"
            )
        records.append(record)
    return records


def write_atomically(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Replaces the content of `path` by `records`. Even after a crash, readers see either the old
    file or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(to_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())  # the rename must not reach the disk before the content
    os.replace(temporary, path)


def keep(path: Path, wanted: Callable[[Record], bool]) -> None:
    """Atomically removes from `path` every record for which `wanted` returns False. Ignores a
    missing file."""
    if path.exists():
        write_atomically(path, [record for record in read_jsonl(path) if wanted(record)])


def finite(value: Any) -> Any:
    """Returns a copy of a JSON value in which None replaces every infinite or NaN number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
