"""The shipped model: the tool makes it reproducibly, and it leaves reinforcement learning something to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

TOOL = ROOT / "tools/make_tiny_model.py"


def make(path: Path, *arguments: str) -> bytes:
    subprocess.run([sys.executable, str(TOOL), str(path), "--steps", "3", *arguments], check=True, capture_output=True)
    return (path / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    first = make(tmp_path / "a")
    assert first == make(tmp_path / "b")
    assert first != make(tmp_path / "c", "--seed", "2")


def test_the_shipped_model_is_small_and_whole() -> None:
    folder = ROOT / "assets/tiny-adder"
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 5 * 2**20
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        f.name for f in folder.iterdir()
    }
