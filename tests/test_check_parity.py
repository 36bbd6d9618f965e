"""tools/check_parity.py, as a user runs it, on checkpoints it has never seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import save_model
from runs import ROOT

from megatron_stare.models import FAMILIES as KNOWN

pytestmark = pytest.mark.distributed


def check_parity(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/check_parity.py"), *arguments]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def test_a_checkpoint_is_held_against_transformers(tmp_path: Path) -> None:
    save_model(tmp_path, "llama_tied_llama3")  # one key-value head, shared by two ranks; 37 words; scaled RoPE
    done = check_parity(str(tmp_path), "--tp", "2", "--pp", "2")
    assert done.returncode == 0, done.stderr
    assert "weights: come back bit for bit" in done.stdout


def test_a_difference_is_found(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    done = check_parity(str(tmp_path), "--threshold", "1e-12")
    assert done.returncode == 1
    assert "logits: largest difference" in done.stdout


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    done = check_parity(str(tmp_path), "--tp", "3")
    assert done.returncode == 2
    assert "4 attention heads cannot be cut over 3" in done.stderr
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    done = check_parity(str(tmp_path))
    assert done.returncode == 2
    assert f"known: {', '.join(sorted(KNOWN))}" in done.stderr
