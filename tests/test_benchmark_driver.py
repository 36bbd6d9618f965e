"""The benchmark of a step's replies, run small and in one process: it reads what was sent, or says
that it does not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parents[1] / "benchmarks" / "driver.py"
SMALL = ["--inline", "--replies", "24", "--samples", "4", "--tokens", "600", "--data-ranks", "2"]


@pytest.mark.wide
def test_replies_are_read_verified_laid_out_and_dealt(tmp_path: Path) -> None:
    """Tokens, log-probs and text bit for bit (its `check`); a share is its part of the bytes."""
    out = tmp_path / "driver.json"
    done = subprocess.run(
        [sys.executable, str(DRIVER), *SMALL, "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(out.read_text())
    assert (result["replies"], result["tokens"]) == (24, 24 * 600)
    received = result["bytes_a_rank_receives"]
    # ids of prompt and response, log-probs and loss mask
    columns = 24 * ((64 + 600) * 4 + 600 * (4 + 1))
    assert columns < received["1"] < 1.2 * columns
    assert received["1"] / 2 < received["2"] < 1.1 * received["1"] / 2
    assert set(result["targets"]) < set(result)
