"""Runs inside a worker of a run, as a thread: what its heap is, a line a step, for heap.py.

It imports nothing of the project, so that the worker is as it would be.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from pathlib import Path

LOOK_S = 0.004
# of mallinfo2(3): `arena` is the heap's size, `uordblks` what is in use of it, `hblkhd` is in pages of its own
FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def watch() -> None:
    """Until the folder goes. Of the time since the last step's end: the least and the most in use, MB; and the heap."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Info
    folder = Path(os.environ["HEAP_FOLDER"])
    record, out = folder / "run/metrics.jsonl", folder / f"looks/{os.getpid()}"
    most, least, size = 0, sys.maxsize, 0
    while folder.exists():
        time.sleep(LOOK_S)
        now = mallinfo2()
        used = now.uordblks + now.hblkhd
        most, least = max(most, used), min(least, used)
        if not record.exists() or record.stat().st_size == size:
            continue
        size = record.stat().st_size
        look = {
            "step": record.read_text().count("\n"),
            "least": least >> 20,
            "most": most >> 20,
            "heap": (now.arena + now.hblkhd) >> 20,
        }
        with out.open("a") as file:
            file.write(json.dumps(look) + "\n")
        most, least = 0, sys.maxsize
