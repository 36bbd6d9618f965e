"""A verifier that never answers, or slowly, where a file says so. Imports no torch: verifiers'
processes do not."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from megatron_stare.rewards.arithmetic_verifier import verify as judge


def verify(response: str, answer: str):
    """Judges as the arithmetic verifier; never returns while the file that the variable names
    exists."""
    if Path(os.environ["MEGATRON_STARE_TEST_STALL"]).exists():
        threading.Event().wait()
    return judge(response, answer)


def slow(response: str, answer: str):
    """Takes as many seconds as the file says; a tenth of a twentieth where there is none."""
    file = Path(os.environ["MEGATRON_STARE_TEST_STALL"])
    time.sleep(float(file.read_text()) if file.exists() else 0.02)
    return judge(response, answer)
