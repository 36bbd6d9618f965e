"""A run that one release of megatron-core began is continued with the other, either way, as the
first would have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.releases import ROOT, python_of
from support.runs import INLINE, command, metrics, model

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

LAYOUTS = {
    "inline": INLINE,
    "tp2": {"parallel.tensor": 2},
    "dp2": {"parallel.tensor": 1, "parallel.data": 2, "optimizer.distributed": True},
}
STEPS = {"run.steps": 4, "run.checkpoint_every": 2}


def run(python: str, folder: Path, *overrides: str, layout: str) -> str:
    """Trains with this checkout's code under a Python of another environment, and returns what the
    run says."""
    _, *arguments = command(model(), *overrides, **LAYOUTS[layout], **STEPS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def release_of(python: str) -> str:
    ask = "import importlib.metadata as m; print(m.version('megatron-core'))"
    return subprocess.run(
        [python, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("newer", [True, False], ids=["to the newer", "to the older"])
def test_the_other_release_goes_on_to_the_same_weights(
    tmp_path: Path, newer: bool, layout: str
) -> None:
    began, goes_on = python_of(not newer), python_of(newer)
    assert {release_of(began), release_of(goes_on)} == {"0.16.1", "0.19.2"}
    run(began, tmp_path, "run.dir=whole", layout=layout)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step_000004")
    shutil.rmtree(tmp_path / "cut/hf")
    said = run(goes_on, tmp_path, "run.dir=cut", "--resume", layout=layout)
    assert "continuing after step 2" in said
    other, same = (load_file(tmp_path / each / "hf/model.safetensors") for each in ("cut", "whole"))
    assert other.keys() == same.keys()
    assert [name for name in same if not torch.equal(other[name], same[name])] == []
    assert json.dumps(metrics(tmp_path / "cut")[:2]) == json.dumps(metrics(tmp_path / "whole")[:2])
    assert len(metrics(tmp_path / "cut")) == 4
