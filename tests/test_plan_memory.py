"""tools/plan_memory.py, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import FAMILIES
from support.runs import ROOT

LAYOUT = ("--tp", "2", "--sp", "--pp", "2", "--dp", "2", "--ep", "2")


def plan_memory(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/plan_memory.py"), *arguments]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder without weights."""
    (tmp_path / "config.json").write_text(FAMILIES["qwen3_moe"]().to_json_string())
    return str(tmp_path)


def test_a_layout_is_planned_from_a_config_json_alone(model: str) -> None:
    done = plan_memory(model, *LAYOUT, "--json", "--processes", "2")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert [rank["rank"] for rank in plan["ranks"]] == list(range(8))
    assert plan["faults"] == [] and plan["layout"]["world"] == 8
    totals = [sum(rank["bytes"].values()) for rank in plan["ranks"]]
    most, least = plan["bytes"]["total"]["max"], plan["bytes"]["total"]["min"]
    assert (most["bytes"], least["bytes"]) == (max(totals), min(totals))
    assert totals[most["rank"]] == max(totals) and totals[least["rank"]] == min(totals)
    assert any("activations" in what for what in plan["assumed"])


def test_the_table_says_the_same(model: str) -> None:
    done = plan_memory(model, *LAYOUT)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith(f"{model} (qwen3_moe): ") and second.startswith(
        "8 ranks (tensor 2, pipeline 2, data 2, expert 2)"
    )
    rows = [line.split()[0] for line in rest if line and line.split()[-2] == "rank"]
    assert rows == ["parameters", "gradients", "main", "moments", "total"]
    assert rest[-1] == "names, tensors, checkpoint and weight stream: complete, nothing twice"


def test_context_parallel_ranks_hold_all_parameters_and_share_the_optimizer(model: str) -> None:
    done = plan_memory(model, "--cp", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert plan["faults"] == []
    assert (plan["layout"]["context"], plan["layout"]["data"], plan["layout"]["world"]) == (2, 1, 2)
    for rank in plan["ranks"]:
        assert rank["bytes"]["parameters"] >= 2 * plan["parameters"]  # bfloat16
        assert 0.45 < rank["bytes"]["moments"] / (4 * rank["bytes"]["parameters"]) < 0.55
    assert any("cut over 2 data-parallel replicas" in what for what in plan["assumed"])


def test_what_cannot_be_planned_is_refused(model: str) -> None:
    done = plan_memory(model, "--tp", "3", "--sp")
    assert done.returncode == 2 and "4 attention heads cannot be cut over 3" in done.stderr
    done = plan_memory(model, "--dp", "0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    done = plan_memory(f"{model}/none")
    assert done.returncode == 2 and "cannot read the model's config.json" in done.stderr


def test_a_fault_ends_with_1(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plan_memory

    from megatron_stare.megatron.dry import planned_layout

    monkeypatch.setattr(planned_layout, "faults", lambda *_: [f"fault {n}" for n in range(22)])
    assert plan_memory.main([model]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["wrong: fault 19", "wrong: and 2 more; --json has all"]
