"""What W&B has written of a run that it keeps offline: the rows in its files.

W&B buffers up to a block of 32 KB, and a driver that is killed takes that with it. So its files, and not what it was
given, say where a continued run has to go on. They are logs of LevelDB's form (github.com/google/leveldb, doc/
log_format.md) after a header of 7 bytes, of protocol buffers that the package describes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_WHOLE, _LAST = 1, 4


def offline_rows(run_dir: Path) -> list[dict[str, Any]] | None:
    """Those of all starts of a run, oldest first, as they were logged; None where it was not kept offline."""
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    if not (files := sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))):
        return None
    for file in files:
        for packed in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(packed)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                )
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """The whole ones; one that was cut off is left out."""
    at, part = _HEADER, b""
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:  # no room for a header: the rest of the block is empty
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if kind == 0 or at + _HEADER + size > len(data):
            return
        part, at = part + data[at + _HEADER : at + _HEADER + size], at + _HEADER + size
        if kind in (_WHOLE, _LAST):
            yield part
            part = b""
