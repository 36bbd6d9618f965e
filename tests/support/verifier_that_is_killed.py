"""A verifier whose process is killed as it starts, once for each byte of the file that
KILL_AT_START names."""

from __future__ import annotations

import os
import signal
from pathlib import Path

orders = Path(os.environ["KILL_AT_START"])
if left := orders.read_text():
    orders.write_text(left[1:])
    os.kill(os.getpid(), signal.SIGKILL)


def verify(response: str, answer: str) -> float:
    return float(response == answer)
