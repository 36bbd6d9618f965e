"""tools/check_parity.py, as a user runs it, on checkpoints it has never seen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import save_model
from support.runs import ROOT

from megatron_stare.models import FAMILIES as KNOWN
from megatron_stare.weights.files.convert import Options, convert

pytestmark = pytest.mark.distributed


def check_parity(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/check_parity.py"), *arguments]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


@pytest.mark.wide
@pytest.mark.parametrize("second", ["--pp", pytest.param("--cp", marks=pytest.mark.slow)])
def test_a_checkpoint_is_held_against_transformers(tmp_path: Path, second: str) -> None:
    # one key-value head, shared by two ranks; 37 words; scaled RoPE
    save_model(tmp_path, "llama_tied_llama3")
    done = check_parity(str(tmp_path), "--tp", "2", second, "2")
    assert (done.returncode, done.stderr) == (0, "")
    logits, weights = done.stdout.splitlines()  # and no word of an upstream's
    assert logits.startswith("logits: largest difference ")
    assert weights == "weights: come back bit for bit"


@pytest.mark.wide
def test_logits_are_held_in_proportion_and_derived_tensors_left_out(tmp_path: Path) -> None:
    """A right model of logits in the hundreds, and frequencies that old checkpoints hold."""
    save_model(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    held["lm_head.weight"] *= 1000
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(held, file, {"format": "pt"})
    done = check_parity(str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    difference, largest = re.search(r"difference (\S+) .*up to (\S+)\)", done.stdout).groups()  # type: ignore[union-attr]
    assert float(largest) > 100 and float(difference) < 1e-5 * float(largest)
    assert "weights: come back bit for bit" in done.stdout
    done = check_parity(str(tmp_path), "--threshold", "1e-12")
    assert done.returncode == 1


@pytest.mark.wide
def test_a_difference_is_found(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    done = check_parity(str(tmp_path), "--threshold", "1e-12")
    assert done.returncode == 1
    assert "logits: largest difference" in done.stdout


@pytest.mark.wide
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


@pytest.mark.wide
def test_a_checkpoint_of_megatron_is_refused_with_the_command_that_converts_it(
    tmp_path: Path,
) -> None:
    converted = tmp_path / "converted"
    convert(ROOT / "assets/tiny-adder", converted, None, Options())
    done = check_parity(str(converted))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"error: {converted}: this is a distributed checkpoint, which transformers cannot read",
        f"  fix: make a Hugging Face folder of it first: megatron-stare convert {converted} HF_DIR",
    ]


@pytest.mark.wide
def test_a_folder_without_its_weights_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen2")
    (tmp_path / "model.safetensors").unlink()
    done = check_parity(str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}: no model.safetensors")


@pytest.mark.wide
def test_help_says_nothing_else() -> None:
    for tool in ("check_parity", "check_invariance", "check_vectors", "make_tiny_model"):
        command = [sys.executable, str(ROOT / f"tools/{tool}.py"), "--help"]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), tool
        assert done.stdout.startswith(f"usage: {tool}.py ")
