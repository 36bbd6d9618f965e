"""JSON Lines files that outlive kill -9: a line is whole or is dropped, and a resumed run can cut
the file back.

Written by `sinks/jsonl_files.py`, read by it and by the report. Knows nothing of what the records
mean, except that each carries an integer under "step".
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
    """One line of strict JSON, newline included; NaN and infinities become null, which JSON has no
    number for."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def read_jsonl(path: Path) -> list[Record]:
    """The records of `path`, oldest first; [] where there is no file. A torn last line is left out.

    Raises:
        DataError: a line before the last is not a JSON object, so the file was damaged by something
            else than a kill.
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
    """Replaces `path` by `records`; whoever reads it meanwhile, or after a crash, sees the old file
    or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(to_line(record) for record in records)
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the bytes it names
    os.replace(temporary, path)


def keep(path: Path, wanted: Callable[[Record], bool]) -> None:
    """Cuts `path` down to the records that are `wanted`, atomically; no file is no error."""
    if path.exists():
        write_atomically(path, [record for record in read_jsonl(path) if wanted(record)])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value
