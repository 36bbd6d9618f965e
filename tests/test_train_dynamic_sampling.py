"""Runs that sample until enough groups teach something, killed and continued."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import metrics, model, train

DYNAMIC = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "run.steps": 3,
    "run.checkpoint_every": 1,
    "batch.generate_prompts": 3,  # of the 4 a step trains on: every step has a second round
    "rollout.environment": "support.deadly.Deadly",
}


def test_killed_in_the_middle_of_a_refill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = tmp_path / "kill"
    monkeypatch.setenv("KILL_AT", str(order))
    done = train(model(), "run.dir=whole", cwd=tmp_path, **DYNAMIC)
    assert done.returncode == 0, done.stderr
    whole = metrics(tmp_path / "whole")
    assert all(step["sampling/rounds"] >= 2 and step["group/degenerate"] == 0 for step in whole)
    used = [round(4 / (1 - step["sampling/dropped"])) for step in whole]
    assert sum(used) > 12  # some groups taught nothing

    order.write_text(str(sum(used[:2]) + 3))  # the first prompt of the second round of step 3
    killed = train(model(), "run.dir=killed", cwd=tmp_path, **DYNAMIC)
    assert killed.returncode == -signal.SIGKILL and not order.exists()
    assert len(metrics(tmp_path / "killed")) == 2
    resumed = train(model(), "run.dir=killed", "--resume", cwd=tmp_path, **DYNAMIC)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(tmp_path / "killed") == whole
    want, got = (load_file(tmp_path / run / "hf/model.safetensors") for run in ("whole", "killed"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def test_rounds_that_cannot_fill_a_step_are_refused(tmp_path: Path) -> None:
    done = train(model(), "batch.generate_prompts=1", "batch.max_rounds=3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "batch.generate_prompts: 3 rounds of 1 prompt groups cannot give the step's 4" in done.stderr
    assert "at least 2" in done.stderr
