"""tools/check_invariance.py: layouts pass, a trainer with thresholds per rank does not."""

from __future__ import annotations

import subprocess
import sys

import pytest
from runs import ROOT, environment

from megatron_stare.algorithms import METHODS

# what a method cannot do without: settings that have no default
NEEDS = {"dr_grpo": ["length_norm=24"]}


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/check_invariance.py"), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=280)


@pytest.mark.distributed
def test_thresholds_per_rank_are_caught() -> None:
    arguments = ["--world", "2", "--micro-batch-tokens", "64", "--algorithm", "stare", "--set", "variant=C2"]
    assert check(*arguments).returncode == 0
    mutant = check(*arguments, "--trainer", "mutants.PerRankThresholds")
    assert mutant.returncode == 1
    assert "plus: given equal scores, other tokens are selected" in mutant.stdout


def test_an_impossible_layout_is_refused() -> None:
    refused = check("--world", "2", "--cp", "2")
    assert refused.returncode == 2
    assert "context parallelism is not supported yet" in refused.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_tp2_dp2(method: str) -> None:
    settings = NEEDS.get(method, [])
    extra = ["--set", *settings] if settings else []
    done = check("--world", "4", "--tp", "2", "--algorithm", method, *extra)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    ["--pp 2", "--pp 2 --vpp 2", "--tp 2 --pp 2", "--world 4 --pp 2", "--tp 4", "--tp 2 --sp", "--world 4"],
)
@pytest.mark.parametrize("packed", ["", "--padded"])
def test_stare_in_every_layout(layout: str, packed: str) -> None:
    done = check(*layout.split(), *packed.split(), "--algorithm", "stare", "--set", "variant=C2")
    assert done.returncode == 0, done.stdout + done.stderr
