"""The operator needs no memory beside its logits: the proof in benchmarks/vocab_memory.py holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks/vocab_memory.py"
COLUMNS = 151936


# a float32 copy of the logits, four bytes for each of their two, is above the limit in both
@pytest.mark.parametrize("rows", [2048, pytest.param(8192, marks=pytest.mark.slow)])
def test_forward_and_backward_within_imports_logits_and_360_mb(tmp_path: Path, rows: int) -> None:
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--rows", str(rows), "--out", out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    if torch.version.cuda is None:  # whose imports take more
        assert result["peak_rss_mb"] * 1e6 <= 2 * rows * COLUMNS + 600e6
    assert (result["peak_rss_mb"] - result["imports_mb"]) * 1e6 <= 2 * rows * COLUMNS + 360e6
