"""Whole runs and checkpoints: one resumed in another layout, and one started from a converted
checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import ROOT, environment, metrics, model, train

from megatron_stare.run_dir.json_lines import read_jsonl

pytestmark = pytest.mark.distributed
# one process: seconds a run
ALONE = {"runtime.runner": "inline", "parallel.tensor": 1, "eval.prompts": 0}
SAMPLED = ("reward/", "length/", "signal/", "data/")  # depends on what was sampled alone


@pytest.mark.wide
@pytest.mark.parametrize(
    "layout",
    [
        {"parallel.tensor": 2},
        pytest.param({"parallel.tensor": 1, "parallel.data": 2}, marks=pytest.mark.slow),
    ],
    ids=["tp2", "dp2"],
)
def test_resumed_in_another_layout(tmp_path: Path, layout: dict[str, int]) -> None:
    """The order of the data, too, is what it was: the same prompts, in the same order, get the same
    responses."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = {"run.steps": 3, "run.checkpoint_every": 2, "run.rollouts_every": 1}
    done = train(model(), f"run.dir={whole}", cwd=tmp_path, **ALONE, **steps)
    assert done.returncode == 0, done.stderr
    # what the same run leaves behind, killed after step 2
    (cut / "checkpoints").mkdir(parents=True)
    (whole / "checkpoints/step_000002").rename(cut / "checkpoints/step_000002")
    for name in ("config.yaml", "metrics.jsonl"):
        (cut / name).write_text((whole / name).read_text())

    split = {**ALONE, "runtime.runner": "ray", **layout}
    resumed = train(model(), f"run.dir={cut}", "--resume", cwd=tmp_path, **split, **steps)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after step 2" in resumed.stdout
    *before, want = metrics(whole)
    *kept, got = metrics(cut)
    assert kept == before
    assert got.keys() == want.keys()
    # the weights are bit-equal, so the step is the same but for rounding
    for name, value in want.items():
        exact = name.startswith(SAMPLED)
        assert got[name] == (value if exact else pytest.approx(value, rel=1e-3, abs=1e-5)), name
    assert any(name.startswith(SAMPLED) for name in want)
    rows = [read_jsonl(run / "rollouts/step_000003.jsonl") for run in (whole, cut)]
    said = [[(row["prompt"], row["response"], row["reward"]) for row in each] for each in rows]
    assert said[0] == said[1] and len(said[0]) > 4


@pytest.mark.wide
def test_a_converted_checkpoint_trains_as_its_folder_does(tmp_path: Path) -> None:
    base = ROOT / "assets/tiny-adder"
    convert = [
        sys.executable,
        "-m",
        "megatron_stare.cli",
        "convert",
        str(base),
        str(tmp_path / "base"),
    ]
    subprocess.run(convert, check=True, env=environment(), cwd=tmp_path, capture_output=True)
    for name, path in (("folder", base), ("converted", tmp_path / "base")):
        done = train(f"model.path={path}", f"run.dir={tmp_path / name}", cwd=tmp_path, **ALONE)
        assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "converted") == metrics(tmp_path / "folder")
