"""tools/check_invariance.py: layouts pass, a trainer with thresholds per rank does not."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT, environment

from megatron_stare.algorithms import METHODS

# as a script has it: its own folder first
sys.path.insert(0, str(ROOT / "tools"))
compare = importlib.import_module("invariance.compare").compare


def check(*arguments: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/check_invariance.py"), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)


@pytest.mark.distributed
def test_thresholds_per_rank_are_caught() -> None:
    arguments = ["--world", "2", "--micro-batch-tokens", "64", "--algorithm", "stare", "--set", "variant=C2"]
    passed = check(*arguments)
    assert (passed.returncode, passed.stderr) == (0, "")  # not a word of an upstream's
    mutant = check(*arguments, "--trainer", "mutants.PerRankThresholds")
    assert mutant.returncode == 1
    assert "plus: given equal scores, other tokens are selected" in mutant.stdout


def test_an_impossible_layout_is_refused() -> None:
    refused = check("--world", "2", "--cp", "2")
    assert refused.returncode == 2
    assert "context parallelism is not supported yet" in refused.stderr


def test_a_gradient_that_is_off_is_a_fault() -> None:
    """The comparison itself, on numbers: a tensor off by more than it may, a token selected otherwise, another loss."""
    step = {
        "given": {"plus": {1, 2}},
        "selected": {"plus": {1, 2}},
        "near": {"plus": set()},
        "gradients": {"w": torch.tensor([1.0, 2.0]), "small": torch.tensor([1e-9])},
        "weights": {"w": torch.tensor([0.5, 0.5])},
        "metrics": {"loss/policy": 0.1, "optimizer/grad_norm": 2.0},
    }
    assert compare(step, copy.deepcopy(step)).faults == []

    def faults(key: str, value: Any) -> list[str]:
        return compare(step, {**copy.deepcopy(step), key: value}).faults

    off = torch.tensor([1.0, 2.0 + 3e-5])
    assert len(faults("gradients", {**step["gradients"], "w": off})) == 1
    assert faults("gradients", {**step["gradients"], "small": torch.tensor([2e-9])}) == []  # nothing beside the others
    assert len(faults("gradients", {**step["gradients"], "w": off * float("nan")})) == 1
    assert len(faults("gradients", {"w": off})) == 1
    assert len(faults("weights", {"w": torch.tensor([0.5, 0.5 + 3e-6])})) == 1
    assert len(faults("selected", {"plus": {1, 3}})) == 1
    assert len(faults("given", {"plus": {1, 3}})) == 1
    assert len(faults("metrics", {"loss/policy": 0.1001, "optimizer/grad_norm": 2.0})) == 1
    near = compare(step, {**copy.deepcopy(step), "selected": {"plus": {1, 3}}, "near": {"plus": {2, 3}}})
    assert near.faults == [] and near.excused == [2, 3]


@pytest.mark.slow
@pytest.mark.distributed
def test_every_method_in_every_layout(tmp_path: Path) -> None:
    out = tmp_path / "invariance.json"
    done = check("--all", "--out", str(out), timeout=3000)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    rows = json.loads(out.read_text())["methods"]
    assert rows.keys() >= METHODS.keys()
    for name, layouts in rows.items():
        assert len(layouts) == 10, name
        assert all(entry["faults"] == 0 for entry in layouts.values()), name
    # the check would be empty where a method selects nothing
    for name in ("stare", "stapo_stare", "twenty_entropy", "kl_cov"):
        assert all(entry["selected"] > 0 for entry in rows[name].values()), name
