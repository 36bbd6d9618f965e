"""Runs that cut long responses and continue them in later steps, killed and continued themselves."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import metrics, model, train

from megatron_stare.rollout.sources.kept import from_bytes
from megatron_stare.run_dir.run_state import KEPT

PARTIAL = {
    "runtime.runner": "inline",
    "parallel.tensor": 1,
    "eval.prompts": 0,
    "run.steps": 4,
    "run.checkpoint_every": 3,
    "checkpoint.background": "false",  # that of step 3 is complete when step 4 begins
    "partial.tokens": 8,
    "rollout.temperature": 2,  # at which responses have 5 to 32 tokens; at 1 nearly all have 21
    "partial.prompts": 7,  # of which a step takes 4
    "algorithm": "{name: stare, correction: {mode: truncate}}",
    "rollout.environment": "support.deadly.Deadly",
    "observability.sinks": "[jsonl,support.cursors_sink.Cursors]",
}


def trained_on(run: Path) -> list[int]:
    """Prompts in the order of the steps."""
    return [cursor for step in json.loads((run / "cursors.json").read_text()).values() for cursor in step]


def kept(checkpoint: Path) -> list[int]:
    """Prompts whose responses are kept in it."""
    return [group[0].prompt.cursor for group in from_bytes((checkpoint / KEPT).read_bytes())]


def test_killed_while_responses_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = tmp_path / "kill"
    monkeypatch.setenv("KILL_AT", str(order))
    done = train(model(), "run.dir=whole", cwd=tmp_path, **PARTIAL)
    assert (done.returncode, done.stderr) == (0, "")
    whole, used = metrics(tmp_path / "whole"), trained_on(tmp_path / "whole")
    assert len(used) == len(set(used)) == 16
    assert any(step["partial/continued"] > 0 for step in whole)
    assert max(step["staleness/max_age"] for step in whole) > 0
    left = kept(tmp_path / "whole/checkpoints/step_000004")
    assert len(left) == 3 and sorted(used + left) == list(range(19))  # none is lost

    order.write_text("17")  # begun in step 4, when three groups of the steps before are kept
    killed = train(model(), "run.dir=killed", cwd=tmp_path, **PARTIAL)
    assert killed.returncode == -signal.SIGKILL and not order.exists()
    assert len(metrics(tmp_path / "killed")) == 3 and len(kept(tmp_path / "killed/checkpoints/step_000003")) == 3
    resumed = train(model(), "run.dir=killed", "--resume", cwd=tmp_path, **PARTIAL)
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(tmp_path / "killed") == whole
    assert trained_on(tmp_path / "killed") == used
    want, got = (load_file(tmp_path / run / "hf/model.safetensors") for run in ("whole", "killed"))
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
