"""Runs of a release before formats are continued as by that release, whose code runs here beside
today's.

What it had recorded stays, to the bit; what is added differs by rounding alone: sums are made in
another order since.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from support.releases import python_of
from support.runs import ROOT, command, metrics, train

from megatron_stare.cli import main
from megatron_stare.config.formats import FORMAT

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

BEFORE = "bfc8822"  # the last commit whose files have no number
ALONE = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "run.steps": 4,
    "run.checkpoint_every": 2,
    "run.rollouts_every": 1,
    "model.path": "assets/tiny-adder",  # which was recorded as it is here
}
NEW_SINCE = {"update/empty"}  # among others


def alike(new: Any, old: Any, exact: bool) -> bool:
    """Checks that each number of `old` is in `new`, to rounding or to the bit; whole numbers and
    words are equal."""
    if isinstance(old, dict):
        return all(key in new and alike(new[key], old[key], exact) for key in old)
    if isinstance(old, list):
        return len(new) == len(old) and all(
            alike(one, other, exact) for one, other in zip(new, old, strict=True)
        )
    if exact or not isinstance(old, float):
        return bool(new == old)
    return bool(new == pytest.approx(old, rel=1e-3, abs=1e-5))


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run of four steps was made in, `run`, by the code of that commit, `old`."""
    home = tmp_path_factory.mktemp("home")
    packed = subprocess.run(
        ["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(home / "old", filter="data")
    (home / "assets").symlink_to(home / "old/assets")
    environment = {**os.environ, "PYTHONPATH": str(home / "old")}
    _, *arguments = command("run.dir=run", config=home / "old/configs/quickstart.yaml", **ALONE)
    python = python_of(newer=False)  # that commit knows no other megatron-core
    done = subprocess.run(
        [python, *arguments], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return home


@pytest.fixture
def cut(home: Path) -> Path:
    """Copies the run as a kill after step 4, before its checkpoint, leaves it."""
    shutil.rmtree(home / "cut", ignore_errors=True)
    shutil.copytree(home / "run", home / "cut")
    shutil.rmtree(home / "cut/checkpoints/step_000004")
    shutil.rmtree(home / "cut/hf")
    return home / "cut"


def test_a_run_without_a_format_is_continued_to_the_same_end(home: Path, cut: Path) -> None:
    recorded = yaml.safe_load((cut / "config.yaml").read_text())
    assert "format" not in recorded and recorded["model"]["path"] == "assets/tiny-adder"
    assert "format" not in json.loads((cut / "checkpoints/step_000002/run_state.json").read_text())
    config = home / "old/configs/quickstart.yaml"
    arguments = command(
        "run.dir=cut", "performance.share_prompts=false", "--resume", config=config, **ALONE
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=home, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "continuing after step 2" in done.stdout
    now, was = metrics(cut, former=True), metrics(home / "run", former=True)
    assert len(was) == 4
    for step, (new, old) in enumerate(zip(now, was, strict=True), start=1):
        assert alike(new, old, exact=step <= 2), step
        assert new.keys() - old.keys() >= NEW_SINCE if step > 2 else new.keys() == old.keys()
    for step in range(1, 5):
        file = f"rollouts/step_{step:06d}.jsonl"
        assert alike(records(cut / file), records(home / "run" / file), exact=step <= 2), step
    new, old = (records(run / "eval.jsonl") for run in (cut, home / "run"))
    assert alike(new, old, exact=False) and alike(new[:1], old[:1], exact=True)
    weights, expected = (load_file(run / "hf/model.safetensors") for run in (cut, home / "run"))
    assert weights.keys() == expected.keys()
    for name in expected:
        # of some 5e-4 that a step moves
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=1e-5)
    assert yaml.safe_load((cut / "config.yaml").read_text())["format"] == FORMAT
    assert (
        json.loads((cut / "checkpoints/step_000004/run_state.json").read_text())["format"] == FORMAT
    )
    assert "paired, 16 problems" in done.stdout


def test_the_run_converts_from_any_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model was recorded relative to the folder that the run began in, below which it lies."""
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(home / "run"), "converted", "--check"]) == 0
    converted, exported = (
        load_file(folder / "model.safetensors") for folder in (Path("converted"), home / "run/hf")
    )
    assert all(torch.equal(converted[name], exported[name]) for name in exported)
    assert Path("converted/tokenizer.json").exists()
    shutil.copytree(home / "run", "moved")  # from where the model cannot be seen
    assert main(["convert", "moved", "again"]) == 2
    assert "--model HF_DIR" in capfd.readouterr().err


def test_a_newer_checkpoint_is_refused_and_left(home: Path, cut: Path) -> None:
    file = cut / "checkpoints/step_000002/run_state.json"
    file.write_text(json.dumps({"format": FORMAT + 1}))
    left = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    done = train(
        "run.dir=cut", "--resume", cwd=home, config=home / "old/configs/quickstart.yaml", **ALONE
    )
    assert done.returncode == 2
    assert f"run_state.json: written in format {FORMAT + 1} by a newer release" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == left
